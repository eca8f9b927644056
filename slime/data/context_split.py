"""Context parallelism: which tokens of a packed row each rank holds, and which keys its queries attend to.

Every sequence is split into `2 * cp_size` equal chunks, and rank r holds chunks r and `2 * cp_size - 1 - r`, so causal
attention costs the same on every rank (the layout of Megatron's rotary code for packed rows; Llama 3, Dubey et al.
2024, section 3.3.2). Pure: uses neither devices nor process groups.

Invariants
1. The positions of all ranks together are a permutation of the row.
2. Each rank keeps the sequences in row order, with the two chunks of a sequence adjacent.
3. A chunk that ends at offset `b` of its sequence attends to exactly the keys `[0, b)`, with the causal mask aligned to
   the end of the chunk. After a shared prefix, a sequence attends to the prefix, then to its own tokens.
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
    """One rank's share of a row of T tokens and N sequences."""

    positions: Int64s
    """[T / cp] row positions of this rank's tokens, in local order."""
    local_index: Int64s
    """[T] local index of each token, or -1 for tokens of other ranks."""
    key_rows: Int64s
    """[K] keys of each local chunk, chunk by chunk, as indices into the gathered tokens of all ranks."""
    order: Int64s
    """[T] row positions of the gathered tokens, rank by rank."""
    place: Int64s
    """[T] index of each row position in the gathered tokens: the inverse of `order`."""
    query_lengths: tuple[int, ...]
    """[2 N] number of tokens of each local chunk."""
    key_lengths: tuple[int, ...]
    """[2 N] number of keys of each local chunk; they sum to K."""


def context_positions(cu_seqlens: npt.NDArray[np.integer], *, cp_rank: int, cp_size: int) -> Int64s:
    """Returns the row positions [T / cp] of rank `cp_rank`. `cu_seqlens` [N + 1] starts at 0 and ends at T.

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
    """Returns rank `cp_rank`'s share of a row. Raises `DataError` like `context_positions`.

    `prefixes` are the row positions of the shared prefix of each sequence; None if nothing is shared.
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
