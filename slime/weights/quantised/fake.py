"""Fake quantisation: quantises and dequantises a trainer's shard, which yields the weights that engines compute with.

Invariant: fake-quantised weights do not depend on how weights are sharded. Each rank quantises its own shard, so shards
must start and end at block boundaries. `check` rejects other layouts.
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
    """Raises `ConfigError` if splitting over `num_shards` ranks would divide a block of weights."""
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
            f"inside a block of {block or 'all'}, so rounding would depend on the layout; use fewer ranks or set "
            "--trainer-weights plain"
        )


def fake_quantised(shard: Tensor, row: Row, num_shards: int, quantised: QuantisedFormat) -> Tensor:
    """Returns the weights that engines use in place of `shard`, in the same dtype and layout.

    `shard`: one of `num_shards` shards of a row's parameter, or a stack of experts. The gradient passes through
    unchanged (straight-through estimator, arXiv:1308.3432), even for clipped entries, because clipping moves them by at
    most half a step.
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
