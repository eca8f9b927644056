"""Which elements changed, as streams of bytes: skips between them where they are few, a bitmap where they are many.

A skip is the number of unchanged elements before a changed one. If changes fall anywhere with equal probability, skips
are geometric, and so are both parts of a skip that is divided into its low bits and the rest; the rest is written as
bytes, of which 255 says "255 more". So a code of single bytes comes within a few per cent of the entropy at any
density, and where changes come in rows, as those of an embedding do, below it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slime.core.errors import WeightSyncError
from slime.weights.delta.planes import Bytes, Streams, join

MORE = 255
"""In the rest of a skip: as many, and the next byte counts on."""
LOW_BITS = (0, 4, 8, 12)
"""How many low bits of each skip may be written apart."""
BITMAP = 255
"""In the place of the number of low bits: not skips, one bit per element."""
BITMAP_FROM = 0.15
"""Share of changed elements from which on a bitmap is as good as skips, and faster."""
LOOKED_AT = 1 << 16
"""Skips, of the first, by which their form is chosen."""
Positions = NDArray[np.uint32]


def write(changed: NDArray[np.bool_]) -> tuple[int, list[Bytes]]:
    """(form, streams) of a mask."""
    if np.count_nonzero(changed) >= BITMAP_FROM * len(changed):
        return BITMAP, [np.packbits(changed)]
    skips = np.diff(np.flatnonzero(changed), prepend=-1) - 1
    some = skips[:LOOKED_AT]
    low = min(LOW_BITS, key=lambda low: len(join(_skips(some, low))))
    return low, _skips(skips, low)


def read(form: int, streams: Streams, count: int, size: int) -> Positions:
    """The positions of `count` changed ones among `size` elements, ascending."""
    if form == BITMAP:
        bits = np.unpackbits(streams.next(-(-size // 8)), count=size)
        at = np.flatnonzero(bits)
    elif form in LOW_BITS:
        low = [streams.next(count) for _ in range(-(-form // 8))]
        rest = streams.next(count + size // MORE + 1)
        at = np.cumsum(_skip_values(low, rest, form, count) + 1) - 1
    else:
        raise WeightSyncError(f"got positions in form {form}, which nobody here reads; the patch is damaged")
    if len(at) != count or (count and at[-1] >= size):
        raise WeightSyncError(f"got {len(at)} positions up to {at[-1:]} where {count} of {size} changed")
    return at.astype(np.uint32)


def _skips(skips: NDArray[np.int64], low_bits: int) -> list[Bytes]:
    rest = skips >> low_bits
    more = rest // MORE
    out = np.full(int(more.sum()) + len(skips), MORE, np.uint8)
    out[np.cumsum(more + 1) - 1] = rest % MORE
    low = (skips & ((1 << low_bits) - 1)).astype(np.uint16)
    if low_bits == 4:
        return [_nibbles(low.astype(np.uint8)), out]
    if low_bits == 12:
        return [(low & 255).astype(np.uint8), _nibbles((low >> 8).astype(np.uint8)), out]
    return [low.astype(np.uint8), out] if low_bits else [out]


def _nibbles(values: Bytes) -> Bytes:
    even = np.append(values, np.zeros(len(values) % 2, np.uint8)).reshape(-1, 2)
    packed: Bytes = even[:, 0] | (even[:, 1] << 4)
    return packed


def _from_nibbles(packed: Bytes, count: int) -> Bytes:
    if len(packed) != -(-count // 2):
        raise WeightSyncError(f"got {len(packed)} bytes for {count} halves of a byte; the patch is damaged")
    return np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)[:count]


def _skip_values(low: list[Bytes], rest: Bytes, low_bits: int, count: int) -> NDArray[np.int64]:
    ends = np.flatnonzero(rest != MORE)
    if len(ends) != count or len(rest) != (ends[-1] + 1 if count else 0):
        raise WeightSyncError(f"got {len(ends)} skips where {count} elements changed; the patch is damaged")
    skips: NDArray[np.int64] = ((np.diff(ends, prepend=-1) - 1) * MORE + rest[ends]) << low_bits
    if low_bits == 4:
        return skips + _from_nibbles(low[0], count)
    if low_bits and len(low[0]) != count:
        raise WeightSyncError(f"got {len(low[0])} low bytes where {count} elements changed; the patch is damaged")
    if low_bits == 12:
        return skips + low[0] + (_from_nibbles(low[1], count).astype(np.int64) << 8)
    return skips + low[0] if low_bits else skips
