"""What changed elements changed by or to, as streams of bytes: as planes, or by rank where few symbols are common.

The XOR of two neighbouring bfloat16 is 1, 3, 7, ...: a handful of 16-bit symbols make up nearly all. By rank each is
one byte of its own code; as two planes the rare carry into the upper byte costs as much again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slime.core.errors import WeightSyncError
from slime.weights.delta.planes import Bytes, Streams, join, join_planes, split_planes

PLANES, RANKS = 0, 1
RARE = 255
"""In place of a rank: a symbol that has none, which stands apart."""
LOOKED_AT = 1 << 16
"""Symbols, of the first, by which their form is chosen."""
Symbols = NDArray[np.unsignedinteger]


def write(symbols: Symbols) -> tuple[int, list[Bytes]]:
    """(form, streams)."""
    some = symbols[:LOOKED_AT]
    if symbols.dtype == np.uint16 and len(join(_ranked(some))) < len(join(split_planes(some))):
        return RANKS, _ranked(symbols)
    return PLANES, split_planes(symbols)


def read(form: int, streams: Streams, count: int, dtype: np.dtype[np.unsignedinteger]) -> Symbols:
    """The `count` symbols of a form."""
    if form == PLANES:
        return _joined([streams.next(count) for _ in range(dtype.itemsize)], count, dtype)
    if form != RANKS or dtype != np.uint16:
        raise WeightSyncError(f"got symbols of {dtype} in form {form}, which nobody here reads; the patch is damaged")
    table = streams.next(2 * RARE)
    ranks = streams.next(count)
    rare = ranks == RARE
    apart = [streams.next(count) for _ in range(2)]
    if len(ranks) != count or len(table) % 2 or (ranks[~rare] >= len(table) // 2).any():
        raise WeightSyncError(f"got {len(ranks)} ranks in a table of {len(table)} bytes for {count} symbols")
    known = np.zeros(RARE + 1, np.uint16)
    known[: len(table) // 2] = table.view("<u2")
    symbols = known[ranks]
    symbols[rare] = _joined(apart, int(rare.sum()), dtype)
    return symbols


def _ranked(symbols: Symbols) -> list[Bytes]:
    """Table of the most frequent ones, ranks in it, planes of the others."""
    counts = np.bincount(symbols, minlength=1 << 16)
    common = np.argsort(counts, kind="stable")[::-1][:RARE]
    common = common[counts[common] > 1].astype(np.uint16)
    ranks = np.full(1 << 16, RARE, np.uint8)
    ranks[common] = np.arange(len(common), dtype=np.uint8)
    mine = ranks[symbols]
    return [common.astype("<u2").view(np.uint8), mine, *split_planes(symbols[mine == RARE])]


def _joined(planes: list[Bytes], count: int, dtype: np.dtype[np.unsignedinteger]) -> Symbols:
    if any(len(plane) != count for plane in planes):
        raise WeightSyncError(f"got planes of {[len(p) for p in planes]} bytes for {count} symbols")
    return join_planes(planes, dtype)
