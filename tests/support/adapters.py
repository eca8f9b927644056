"""Adapters with a product other than zero, the same whatever the layout."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from megatron.core import parallel_state as mpu

from slime.training.model.names import is_expert
from slime.weights.convert import load_shard


def fill_b(backend: Any, size: float = 0.05) -> None:
    """Random numbers into every `lora_b` of a backend, cut as its table says, and into the optimizer's copies."""
    table = backend.full_table
    for name, parameter in backend._parameters.items():
        if not name.endswith("lora_b"):
            continue
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        whole = torch.randn(table.entry(name).row.shapes[0], generator=torch.Generator().manual_seed(seed)) * size
        rank, world = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
        rank, world = (0, 1) if is_expert(name) else (rank, world)
        shard = load_shard(table, name, {name: whole}.__getitem__, tp_rank=rank, tp_size=world)
        with torch.no_grad():
            parameter.copy_(shard)
    backend._trainable.optimizer.reload_model_params()
