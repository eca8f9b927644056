"""Process groups of the trainer: tensor parallel and data parallel, gloo on a CPU and NCCL on a GPU, with a
deadline.
"""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from slime.core.errors import ConfigError
from slime.weights.rendezvous import join_store, keep_gloo_on, listen_on, open_store


@dataclass(frozen=True, slots=True)
class ParallelInfo:
    """Where one rank stands."""

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    dp_rank: int
    dp_size: int


def init_process_groups(
    device: torch.device,
    *,
    rank: int,
    world_size: int,
    master_address: str,
    master_port: int,
    tp_size: int,
    timeout_s: float,
    listener: socket.socket | None = None,
) -> ParallelInfo:
    """Joins the world and cuts it: neighbouring ranks share a model (TP), the rest is data parallel.

    Rank 0 opens the store on `master_address` alone: on `listener` if it holds that port already, else on
    `master_port`. Every collective that waits longer than `timeout_s` fails. Raises `ConfigError` if the sizes do not
    fit.
    """
    if world_size % tp_size:
        raise ConfigError(
            f"got --tensor-model-parallel-size {tp_size} and {world_size} training ranks; it must divide them"
        )
    limit = timedelta(seconds=timeout_s)
    keep_gloo_on(master_address)
    if rank == 0:
        store = open_store(listener or listen_on(master_address, master_port), world_size=world_size, timeout=limit)
    else:
        store = join_store(master_address, master_port, world_size=world_size, timeout=limit)
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=limit,
        **options,
    )
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=tp_size, distributed_timeout_minutes=max(1, int(timeout_s / 60))
    )
    return ParallelInfo(
        rank=rank,
        world_size=world_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        tp_size=tp_size,
        dp_rank=mpu.get_data_parallel_rank(),
        dp_size=mpu.get_data_parallel_world_size(),
    )


def seed_everything(seed: int, dp_rank: int) -> None:
    """Seeds Python, NumPy, torch and Megatron's tracker. Nothing in a training step draws numbers; hooks may."""
    random.seed(seed + dp_rank)
    np.random.seed((seed + dp_rank) % 2**32)
    torch.manual_seed(seed + dp_rank)
    model_parallel_cuda_manual_seed(seed)


def destroy_process_groups() -> None:
    """Leaves the world; safe to call when never joined."""
    if dist.is_initialized():
        mpu.destroy_model_parallel()
        dist.destroy_process_group()
