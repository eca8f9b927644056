"""transformers fuses the experts of a layer in memory; checkpoints name each of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def by_checkpoint_name(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Parameters (or their gradients) under the names of `model.named_parameters()` -> under those of a checkpoint."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in named:
        prefix, fused, kind = name.partition(".experts.")
        if not fused:
            out[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            for part, piece in zip(parts, weight.chunk(len(parts)), strict=True):
                out[f"{prefix}.experts.{expert}.{part}.weight"] = piece
    return out
