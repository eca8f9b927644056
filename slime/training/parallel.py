"""Process groups for tensor, pipeline, context, expert and data parallelism: gloo on a CPU, NCCL on a GPU."""

from __future__ import annotations

import os
import random
import socket
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from slime.core.topology import ParallelSizes
from slime.weights.rendezvous import join_store, keep_gloo_on, listen_on, open_store


@dataclass(frozen=True, slots=True)
class ParallelInfo:
    rank: int
    world_size: int
    sizes: ParallelSizes
    tp_rank: int
    pp_rank: int
    cp_rank: int
    ep_rank: int
    dp_rank: int
    dp_size: int

    @property
    def tp_size(self) -> int:
        return self.sizes.tp

    @property
    def reports(self) -> bool:
        """Whether this rank reports the loss of its model replica. Exactly one rank per replica does."""
        return self.tp_rank == 0 and self.cp_rank == 0 and self.pp_rank == self.sizes.pp - 1


def init_process_groups(
    device: torch.device,
    *,
    rank: int,
    world_size: int,
    master_address: str,
    master_port: int,
    sizes: ParallelSizes,
    timeout_s: float,
    listener: socket.socket | None = None,
) -> ParallelInfo:
    """Joins the world and creates Megatron's groups, innermost first: tensor, context, data, pipeline.

    Rank 0 opens the store only on `master_address`: on `listener`, or on `master_port` if `listener` is None. A
    collective that waits longer than `timeout_s` fails. Raises `ConfigError` if the sizes do not divide the world size.
    """
    dp_size = sizes.dp(world_size)
    limit = timedelta(seconds=timeout_s)
    keep_gloo_on(master_address)
    if rank == 0:
        store = open_store(listener or listen_on(master_address, master_port), world_size=world_size, timeout=limit)
    else:
        store = join_store(master_address, master_port, world_size=world_size, timeout=limit)
    # Do not bind the world to a device: torch would then create later groups by splitting the world's communicator, but
    # the group for weight syncs has members outside the world.
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=limit,
    )
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vp if sizes.vp > 1 else None,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=max(1, int(timeout_s / 60)),
        create_gloo_process_groups=False,  # each would connect every data-parallel rank with every other one
    )
    assert dp_size == mpu.get_data_parallel_world_size(), f"Megatron's data-parallel size is not {dp_size}"
    return ParallelInfo(
        rank=rank,
        world_size=world_size,
        sizes=sizes,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        cp_rank=mpu.get_context_parallel_rank(),
        ep_rank=mpu.get_expert_model_parallel_rank(),
        dp_rank=mpu.get_data_parallel_rank(),
        dp_size=dp_size,
    )


def seed_everything(seed: int, dp_rank: int) -> None:
    """Seeds Python, NumPy, torch and Megatron's RNG tracker for hooks. Training steps draw no random numbers."""
    random.seed(seed + dp_rank)
    np.random.seed((seed + dp_rank) % 2**32)
    torch.manual_seed(seed + dp_rank)
    model_parallel_cuda_manual_seed(seed)


def be_deterministic() -> None:
    """Makes PyTorch use deterministic kernels, and raise where it has none (`--deterministic-mode`).

    If PyTorch only warned, FlashAttention's backward pass would still sum query gradients in a nondeterministic order.
    Filling new tensors with NaN is turned off: it takes time and matters only to code that reads uninitialized memory.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS creates its first handle
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def destroy_process_groups() -> None:
    if dist.is_initialized():
        mpu.destroy_model_parallel()
        dist.destroy_process_group()
