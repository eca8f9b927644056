"""Arrays of a train batch that stay in Ray's object store: a rank fetches those of the samples that it computes.

Of a batch with routed experts they are nearly all bytes (48 layers, 8 choices: 384 a token, where all else is 16), and
a host of which no rank computes a sample has no use for them. Ranks of one host share what one of them fetched.
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
    """An array of Ray's object store (`slime.core.batch.Elsewhere`); it lives as long as this, or a copy of this."""

    ref: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    digests: npt.NDArray[np.uint64] | None = None
    """See `Elsewhere`; it comes with this."""

    @classmethod
    def of(cls, array: npt.NDArray[Any], *, compared: bool = False) -> RemoteArray:
        """Puts it into the store. `compared`: with digests."""
        return cls(ray.put(array), array.shape, array.dtype, digests_of(array) if compared else None)

    @property
    def nbytes(self) -> int:
        """Of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """The array, read only: a view of this host's memory, into which it is fetched if it is not there."""
        found = np.asarray(ray.get(self.ref), dtype=dtype)
        return found.copy() if copy else found


def set_apart(batch: TrainBatch, *, compared: bool = False) -> TrainBatch:
    """The same batch with its routed experts in the store. `compared`: every rank asks which tokens of samples have the
    same experts (`slime.data.shared_prefixes`), and finds it without fetching them.
    """
    return dataclasses.replace(batch, samples=tuple(_apart(s, compared) for s in batch.samples))


def _apart(sample: TrainSample, compared: bool) -> TrainSample:
    if not isinstance(sample.routed_experts, np.ndarray):
        return sample
    return dataclasses.replace(sample, routed_experts=RemoteArray.of(sample.routed_experts, compared=compared))
