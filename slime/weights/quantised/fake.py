"""Fake quantisation of a trainer's shard: quantises and dequantises it, which results in the weights that engines use.

Law: fake-quantised weights do not depend on the partition. Each rank quantises its shard of a weight, so a shard must
begin and end at block boundaries; `check` refuses other layouts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slime.core.errors import ConfigError
from slime.models.common.table import Entry, Row
from slime.weights.hf_shards import by_segments
from slime.weights.quantised.formats import WHOLE, QuantisedFormat


def check(entry: Entry, num_shards: int, quantised: QuantisedFormat) -> None:
    """Raises `ConfigError` if a block of weights would be split between two of `num_shards` ranks."""
    row = entry.row
    if row.dim is None:
        return
    block = quantised.block[row.dim]
    if num_shards == 1 and len(row.segments) == len(row.hf):
        return
    uneven = [size for size in row.segments if block == WHOLE or size // num_shards % block]
    if uneven:
        raise ConfigError(
            f"{num_shards} tensor-parallel ranks split the {uneven[0]} entries of {entry.hf[0]} in {quantised.title} "
            f"inside a block of {block or 'all'}, so the rounding would depend on the layout; use fewer ranks, or set "
            "--trainer-weights plain"
        )


def fake_quantised(shard: Tensor, row: Row, num_shards: int, quantised: QuantisedFormat) -> Tensor:
    """Returns the weights that engines multiply with instead of `shard`, in the dtype and layout of `shard`.

    `shard`: one of `num_shards` shards of a row's parameter, or a stack of experts. The gradient passes unchanged (the
    straight-through estimator, arXiv:1308.3432), because clipping moves no entry by more than half a step.
    """
    faked: Tensor = _StraightThrough.apply(shard, lambda weight: by_segments(row, weight, num_shards, quantised.fake))
    return faked


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, change: Any) -> Tensor:
        with torch.no_grad():
            return change(weight.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
