"""Copies rows and sums the gradients of the copies, for the keys and values of a shared prefix.

A row can be copied any number of times. The reference is `index_select`, which adds gradients in the dtype of the rows
and, on a GPU, in arbitrary order. The fused form adds gradients in float32, in the order of the copies.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slime.ops.select import FUSED, name_of


@dataclass(frozen=True, slots=True)
class Repeats:
    """K copies of T rows."""

    rows: Tensor
    """[K] int64: the source row of each copy."""
    order: Tensor
    """[K] int32: indices of the copies, sorted by source row."""
    starts: Tensor
    """[T + 1] int32: where the copies of each row start in `order`."""

    @staticmethod
    def arrays(rows: npt.NDArray[np.int64], num_rows: int) -> dict[str, npt.NDArray[Any]]:
        """Computes the fields on the host."""
        starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=num_rows))])
        order = np.argsort(rows, kind="stable")
        return {"rows": rows, "order": order.astype(np.int32), "starts": starts.astype(np.int32)}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], prefix: str = "") -> Repeats:
        """Builds an instance from the tensors of `arrays`, whose names start with `prefix`."""
        return cls(*(tensors[prefix + name] for name in ("rows", "order", "starts")))


def repeat_rows(x: Tensor, repeats: Repeats) -> Tensor:
    """x [T, ...] -> [K, ...]. The gradient of a row is the sum over its copies."""
    if name_of("repeats", x) == FUSED:
        out: Tensor = _Repeated.apply(x, repeats)
        return out
    return x.index_select(0, repeats.rows)


@contextmanager
def repeated(rows: Sequence[Tensor], repeats: Repeats) -> Iterator[tuple[Tensor, ...]]:
    """Yields `repeat_rows` of each tensor. Autograd does not save the copies; the backward pass recomputes them."""
    made = tuple(repeat_rows(x, repeats) for x in rows)
    sources = [x.detach() for x in rows]
    places = [(x.data_ptr(), x.shape, x.stride()) for x in made]

    def keep(saved: Tensor) -> Tensor | int:
        place = saved.data_ptr(), saved.shape, saved.stride()
        return places.index(place) if saved.numel() and place in places else saved

    def give(kept: Tensor | int) -> Tensor:
        return sources[kept].index_select(0, repeats.rows) if isinstance(kept, int) else kept

    with torch.autograd.graph.saved_tensors_hooks(keep, give):
        yield made


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, repeats: Repeats) -> Tensor:
        ctx.repeats = repeats
        return x.index_select(0, repeats.rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        kernels: Any = importlib.import_module("slime.ops.kernels.norm")
        total: Tensor = kernels.sum_repeats(grads[0].flatten(1).contiguous(), ctx.repeats.order, ctx.repeats.starts)
        return total.view(-1, *grads[0].shape[1:]), None
