"""Adapters with a product other than zero, the same whatever the layout."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from slime.weights.hf_shards import load_shard


def fill_b(backend: Any, size: float = 0.05) -> None:
    """Random numbers into every `lora_b` of a backend, cut as its table says, and into the optimizer's copies."""
    for own in backend.model.own:
        name, table = own.name, backend.model.table
        if not name.endswith("lora_b"):
            continue
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        whole = torch.randn(table.entry(name).row.shapes[0], generator=torch.Generator().manual_seed(seed)) * size
        shard = load_shard(table, name, {name: whole}.__getitem__, tp_rank=own.tp_rank, tp_size=own.tp_size)
        with torch.no_grad():
            own.shard.copy_(shard)
    backend._trainable.optimizer.reload_model_params()
