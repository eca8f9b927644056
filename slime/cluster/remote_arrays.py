"""Keeps the routed experts of a train batch in Ray's object store until a rank needs them.

Routed experts make up most of a batch (with 48 layers and top-8 routing: 384 values per token, versus 16 for everything
else). Each rank only fetches them for its own samples, and the ranks of a host share the fetched arrays.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import ray

from slime.core.batch import TrainBatch, TrainSample
from slime.core.routed_experts import digests_of


@dataclass(frozen=True, slots=True)
class RemoteArray:
    """An array in Ray's object store (`slime.core.batch.Elsewhere`), freed with the last copy of this object."""

    ref: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    digests: npt.NDArray[np.uint64] | None = None

    @classmethod
    def of(cls, array: npt.NDArray[Any], *, compared: bool = False) -> RemoteArray:
        """Puts an array into the store. `compared`: also compute digests."""
        return cls(ray.put(array), array.shape, array.dtype, digests_of(array) if compared else None)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Fetches the array into this host's object store if needed, and returns a read-only view."""
        found = np.asarray(ray.get(self.ref), dtype=dtype)
        return found.copy() if copy else found


def set_apart(batch: TrainBatch, *, compared: bool = False) -> TrainBatch:
    """Returns the batch with its routed experts moved to the store.

    `compared`: add digests, so that ranks can compare routed experts without fetching them
    (`slime.data.shared_prefixes`).
    """
    return dataclasses.replace(batch, samples=tuple(_apart(s, compared) for s in batch.samples))


def _apart(sample: TrainSample, compared: bool) -> TrainSample:
    if not isinstance(sample.routed_experts, np.ndarray):
        return sample
    return dataclasses.replace(sample, routed_experts=RemoteArray.of(sample.routed_experts, compared=compared))
