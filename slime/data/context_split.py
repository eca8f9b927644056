"""Context parallelism: which tokens of a packed row each rank has, and which keys its queries see.

Every sequence is split into `2 * cp_size` equal chunks, and rank r has chunks r and `2 * cp_size - 1 - r` of each, so
that causal attention costs every rank the same (the layout of Megatron's rotary code for packed rows; Llama 3, Dubey et
al. 2024, section 3.3.2). Pure: uses neither devices nor process groups.

Invariants
1. The positions of all ranks together are a permutation of the row.
2. A rank's tokens keep the order of the sequences; the two chunks of a sequence are adjacent.
3. A chunk that ends at `b` of its sequence sees exactly the keys `[0, b)`, and the causal mask is aligned with the
   chunk's end. A sequence that continues shared tokens sees the shared tokens before its own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slime.core.errors import DataError

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ContextSplit:
    """One rank's part of a row of T tokens and N sequences."""

    positions: Int64s
    """[T / cp] row positions of this rank's tokens, in the rank's order."""
    local_index: Int64s
    """[T] each token's index among this rank's tokens, or -1 for tokens of other ranks."""
    key_rows: Int64s
    """[K] the keys that each chunk sees, chunk by chunk, as indices into the concatenation of all ranks' tokens."""
    order: Int64s
    """[T] row positions of all ranks' tokens, rank by rank."""
    place: Int64s
    """[T] each token's index in the concatenation of all ranks' tokens: the inverse of `order`."""
    query_lengths: tuple[int, ...]
    """[2 N] tokens of each local chunk."""
    key_lengths: tuple[int, ...]
    """[2 N] keys that each local chunk sees; their sum is K."""


def context_positions(cu_seqlens: npt.NDArray[np.integer], *, cp_rank: int, cp_size: int) -> Int64s:
    """Returns the row positions of rank `cp_rank`'s tokens, [T / cp]. `cu_seqlens` [N + 1] starts at 0 and ends at T.

    Raises `DataError` if a sequence cannot be split into `2 * cp_size` chunks.
    """
    parts = [np.zeros(0, np.int64)]
    for start, size in zip(cu_seqlens[:-1].tolist(), _chunk_sizes(cu_seqlens, cp_size), strict=True):
        for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank):
            parts.append(np.arange(start + chunk * size, start + (chunk + 1) * size, dtype=np.int64))
    return np.concatenate(parts)


def split_context(
    cu_seqlens: npt.NDArray[np.integer], *, cp_rank: int, cp_size: int, prefixes: Sequence[Int64s] | None = None
) -> ContextSplit:
    """Returns rank `cp_rank`'s part of a row. Raises `DataError` like `context_positions`.

    `prefixes`: the row positions of the shared tokens before each sequence; None: nothing is shared.
    """
    by_rank = [context_positions(cu_seqlens, cp_rank=rank, cp_size=cp_size) for rank in range(cp_size)]
    order = np.concatenate(by_rank)
    place = np.empty(int(cu_seqlens[-1]), np.int64)
    place[order] = np.arange(len(place))
    local = np.full(len(place), -1, np.int64)
    local[by_rank[cp_rank]] = np.arange(len(by_rank[cp_rank]))
    query_lengths: list[int] = []
    key_lengths: list[int] = []
    keys = [np.zeros(0, np.int64)]
    before = [np.zeros(0, np.int64)] * (len(cu_seqlens) - 1) if prefixes is None else prefixes
    for start, size, prefix in zip(cu_seqlens[:-1].tolist(), _chunk_sizes(cu_seqlens, cp_size), before, strict=True):
        for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank):
            seen = (chunk + 1) * size
            query_lengths.append(size)
            key_lengths.append(len(prefix) + seen)
            keys += [place[prefix], place[start : start + seen]]
    return ContextSplit(
        positions=by_rank[cp_rank],
        local_index=local,
        key_rows=np.concatenate(keys),
        order=order,
        place=place,
        query_lengths=tuple(query_lengths),
        key_lengths=tuple(key_lengths),
    )


def _chunk_sizes(cu_seqlens: npt.NDArray[np.integer], cp_size: int) -> list[int]:
    lengths = np.diff(cu_seqlens)
    if (lengths % (2 * cp_size)).any():
        raise DataError(
            f"sequences of {lengths.tolist()} tokens cannot be split into {2 * cp_size} equal chunks each for "
            f"{cp_size} context-parallel ranks; pack with pad_each_to={2 * cp_size}"
        )
    sizes: list[int] = (lengths // (2 * cp_size)).tolist()
    return sizes
