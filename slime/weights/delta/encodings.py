"""Patch encodings. A patch turns the old bytes of a tensor into exactly the new bytes.

    xor         new ^ old for each changed element: a few distinct, small numbers. Applying a patch twice undoes it, so
                it must be applied only to its base. The chain of digests ensures this.
    overwrite   the new value of each changed element: larger, but idempotent

A patch is a sequence of chunks of `CHUNK` elements. Each chunk consists of a header, position streams and symbol
streams. A manifest identifies the encoding by a key of `ENCODINGS`. The key is never used as an import path, because
other users may be able to write to the folder.

Streams. Bytes with the same meaning are stored in one stream, so that one entropy code fits them. Each stream is one
zstd frame. The zstd parameters favour entropy coding: sequences of symbols hardly ever repeat, and encoding short
matches takes more space than it saves, so zstd searches only for long matches.

Positions. A skip is the number of unchanged elements before a changed one. If all elements change with the same
probability, skips are geometrically distributed. A skip is split into low bits and the rest. The rest is written as
bytes, where 255 means "add 255 and continue". A bytewise entropy code is then within a few per cent of this
distribution's entropy at any density, and does better if changes cluster in rows, as in an embedding. At densities of
at least `BITMAP_FROM`, a bitmap is just as small, and faster.

Symbols. The XOR of two adjacent bfloat16 values is 1, 3, 7, ..., so almost all changes are one of a handful of 16-bit
symbols. Stored as an index into a table of frequent symbols, each one takes one byte. If they were stored as two byte
planes instead, the rare carries into the upper byte would double the size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

from slime.core.errors import WeightSyncError

Bytes = NDArray[np.uint8]
_LENGTH = struct.Struct("<I")
_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=6, chain_log=6, search_log=1, min_match=7
)


def join(streams: Sequence[Bytes]) -> bytes:
    """Compresses each stream into a frame and concatenates the length-prefixed frames. A stream must be below 4 GiB."""
    compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
    frames = [compressor.compress(np.ascontiguousarray(stream).data) for stream in streams]
    return b"".join(part for frame in frames for part in (_LENGTH.pack(len(frame)), frame))


class Streams:
    """Reads the streams written by `join` in order. Raises `WeightSyncError` if the data is damaged."""

    def __init__(self, data: memoryview, at: int = 0) -> None:
        self._data, self.at = data, at

    def next(self, limit: int) -> Bytes:
        """Returns the next stream. If its size exceeds `limit` bytes, raises before decompressing it."""
        frame = self.take(self.take_length())
        try:
            size = zstandard.frame_content_size(frame)
            if not 0 <= size <= limit:
                raise WeightSyncError(f"a stream of {size} bytes exceeds the limit of {limit}; the patch is damaged")
            content = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size)
        except zstandard.ZstdError as error:
            raise WeightSyncError(f"a stream is not valid zstd ({error}); the patch is damaged") from error
        return np.frombuffer(content, np.uint8)

    def take_length(self) -> int:
        (length,) = _LENGTH.unpack(self.take(_LENGTH.size))
        return int(length)

    def take(self, size: int) -> memoryview:
        """Returns the next `size` raw bytes."""
        part = self._data[self.at : self.at + size]
        if len(part) != size:
            raise WeightSyncError(f"the patch is truncated at byte {len(self._data)}")
        self.at += size
        return part


def split_planes(values: NDArray[np.unsignedinteger]) -> list[Bytes]:
    """Splits values into byte planes: the least significant bytes of all values, then the next bytes, and so on."""
    rows = values.astype(values.dtype.newbyteorder("<"), copy=False).view(np.uint8).reshape(-1, values.dtype.itemsize)
    return [np.ascontiguousarray(rows[:, byte]) for byte in range(values.dtype.itemsize)]


def join_planes(planes: Sequence[Bytes], dtype: np.dtype[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """Inverts `split_planes`."""
    rows = np.stack(list(planes), axis=1)
    return np.ascontiguousarray(rows).view(dtype.newbyteorder("<")).reshape(-1).astype(dtype, copy=False)


# --- positions: which elements changed

MORE = 255
"""In the rest of a skip, this byte adds 255 and says that another byte follows."""
LOW_BITS = (0, 4, 8, 12)
"""Choices for the number of low bits of a skip that are written separately."""
BITMAP = 255
"""The format code for positions that are written as a bitmap instead of skips."""
BITMAP_FROM = 0.15
"""Positions are written as a bitmap if at least this fraction of the elements changed."""
LOOKED_AT = 1 << 16
"""Number of skips or symbols that are sampled to choose a format."""
Positions = NDArray[np.uint32]


def write_positions(changed: NDArray[np.bool_]) -> tuple[int, list[Bytes]]:
    """Encodes a mask. Returns (format code, streams)."""
    if np.count_nonzero(changed) >= BITMAP_FROM * len(changed):
        return BITMAP, [np.packbits(changed)]
    skips = np.diff(np.flatnonzero(changed), prepend=-1) - 1
    some = skips[:LOOKED_AT]
    low = min(LOW_BITS, key=lambda low: len(join(_skips(some, low))))
    return low, _skips(skips, low)


def read_positions(form: int, streams: Streams, count: int, size: int) -> Positions:
    """Returns the positions of the `count` changed elements among `size` elements, in ascending order."""
    if form == BITMAP:
        bits = np.unpackbits(streams.next(-(-size // 8)), count=size)
        at = np.flatnonzero(bits)
    elif form in LOW_BITS:
        low = [streams.next(count) for _ in range(-(-form // 8))]
        rest = streams.next(count + size // MORE + 1)
        at = np.cumsum(_skip_values(low, rest, form, count) + 1) - 1
    else:
        raise WeightSyncError(f"unknown position format {form}; the patch is damaged")
    if len(at) != count or (count and at[-1] >= size):
        raise WeightSyncError(
            f"expected {count} positions below {size}, got {len(at)} up to {at[-1:]}; the patch is damaged"
        )
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
        raise WeightSyncError(f"expected {count} 4-bit values, got {len(packed)} bytes; the patch is damaged")
    return np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)[:count]


def _skip_values(low: list[Bytes], rest: Bytes, low_bits: int, count: int) -> NDArray[np.int64]:
    ends = np.flatnonzero(rest != MORE)
    if len(ends) != count or len(rest) != (ends[-1] + 1 if count else 0):
        raise WeightSyncError(f"expected {count} skips, got {len(ends)}; the patch is damaged")
    skips: NDArray[np.int64] = ((np.diff(ends, prepend=-1) - 1) * MORE + rest[ends]) << low_bits
    if low_bits == 4:
        return skips + _from_nibbles(low[0], count)
    if low_bits and len(low[0]) != count:
        raise WeightSyncError(f"expected {count} low bytes, got {len(low[0])}; the patch is damaged")
    if low_bits == 12:
        return skips + low[0] + (_from_nibbles(low[1], count).astype(np.int64) << 8)
    return skips + low[0] if low_bits else skips


# --- symbols: the XOR or the new value of each changed element

PLANES, RANKS = 0, 1
RARE = 255
"""Marks a symbol that is not in the table. Such symbols are written separately."""
Symbols = NDArray[np.unsignedinteger]


def write_symbols(symbols: Symbols) -> tuple[int, list[Bytes]]:
    """Encodes symbols. Returns (format code, streams)."""
    some = symbols[:LOOKED_AT]
    if symbols.dtype == np.uint16 and len(join(_ranked(some))) < len(join(split_planes(some))):
        return RANKS, _ranked(symbols)
    return PLANES, split_planes(symbols)


def read_symbols(form: int, streams: Streams, count: int, dtype: np.dtype[np.unsignedinteger]) -> Symbols:
    if form == PLANES:
        return _joined([streams.next(count) for _ in range(dtype.itemsize)], count, dtype)
    if form != RANKS or dtype != np.uint16:
        raise WeightSyncError(f"unknown format {form} for symbols of {dtype}; the patch is damaged")
    table = streams.next(2 * RARE)
    ranks = streams.next(count)
    rare = ranks == RARE
    apart = [streams.next(count) for _ in range(2)]
    if len(ranks) != count or len(table) % 2 or (ranks[~rare] >= len(table) // 2).any():
        raise WeightSyncError(f"expected {count} valid symbol ranks, got {len(ranks)}; the patch is damaged")
    known = np.zeros(RARE + 1, np.uint16)
    known[: len(table) // 2] = table.view("<u2")
    symbols = known[ranks]
    symbols[rare] = _joined(apart, int(rare.sum()), dtype)
    return symbols


def _ranked(symbols: Symbols) -> list[Bytes]:
    """Returns the table of frequent symbols, each symbol's rank in it, and the byte planes of all other symbols."""
    counts = np.bincount(symbols, minlength=1 << 16)
    common = np.argsort(counts, kind="stable")[::-1][:RARE]
    common = common[counts[common] > 1].astype(np.uint16)
    ranks = np.full(1 << 16, RARE, np.uint8)
    ranks[common] = np.arange(len(common), dtype=np.uint8)
    mine = ranks[symbols]
    return [common.astype("<u2").view(np.uint8), mine, *split_planes(symbols[mine == RARE])]


def _joined(planes: list[Bytes], count: int, dtype: np.dtype[np.unsignedinteger]) -> Symbols:
    if any(len(plane) != count for plane in planes):
        raise WeightSyncError(f"expected byte planes of {count} bytes, got {[len(p) for p in planes]}: damaged patch")
    return join_planes(planes, dtype)


# --- patches

Elements = NDArray[np.unsignedinteger]
CHUNK = 1 << 24
"""Number of elements that are encoded together. Bounds the memory needed in addition to the tensor."""
_HEAD = struct.Struct("<IBB")
"""The header of a chunk: number of changed elements, format of the positions, format of the symbols."""
RAW = "raw"
"""A patch that is the full tensor. Used in full versions, and wherever a delta would not be smaller."""


@dataclass(frozen=True, slots=True)
class Encoding:
    symbols: Callable[[Elements, Elements], Elements]
    """Maps (old, new) of the changed elements to symbols."""
    values: Callable[[Elements, Elements], Elements]
    """Maps (old, symbols) to the new values."""


ENCODINGS: Mapping[str, Encoding] = {
    "xor": Encoding(symbols=np.bitwise_xor, values=np.bitwise_xor),
    "overwrite": Encoding(symbols=lambda old, new: new, values=lambda old, written: written),
}
"""Encodings by name, as in `--update-weight-delta-encoding` and in manifests."""


def elements(data: Bytes, width: int) -> Elements:
    """Returns the bytes as a view of unsigned integers, `width` bytes each."""
    return data.view(np.dtype(f"<u{width}"))


def encode(name: str, old: Bytes, new: Bytes, width: int) -> tuple[bytes, int]:
    """Returns the patch that turns `old` into `new` (empty if they are equal), and the number of changed elements.

    `old`, `new`: flat bytes of equal length. `width`: bytes per element.
    """
    assert len(old) == len(new), f"old has {len(old)} bytes, new has {len(new)}"
    was, now = elements(old, width), elements(new, width)
    chunks = [_chunk(ENCODINGS[name], was[i : i + CHUNK], now[i : i + CHUNK]) for i in range(0, len(was), CHUNK)]
    num_changed = sum(count for _, count in chunks)
    return b"".join(data for data, _ in chunks) if num_changed else b"", num_changed


def apply(name: str, data: Bytes, patch: bytes | memoryview, width: int) -> None:
    """Applies a patch in place. If the patch is damaged, raises `WeightSyncError` and may leave `data` partly
    changed."""
    if name not in ENCODINGS:
        raise WeightSyncError(f"unknown patch encoding {name}; supported: {', '.join(ENCODINGS)}")
    if not patch:
        return
    streams, now = Streams(memoryview(patch)), elements(data, width)
    for start in range(0, len(now), CHUNK):
        part = now[start : start + CHUNK]
        count, where, what = _HEAD.unpack(streams.take(_HEAD.size))
        if count > len(part):
            raise WeightSyncError(f"the patch changes {count} of {len(part)} elements; it is damaged")
        if not count:
            continue
        at = read_positions(where, streams, count, len(part))
        part[at] = ENCODINGS[name].values(part[at], read_symbols(what, streams, count, part.dtype.newbyteorder("=")))
    if streams.at != len(patch):
        raise WeightSyncError(f"the patch has {len(patch)} bytes, but its content ends at byte {streams.at}")


def _chunk(encoding: Encoding, old: Elements, new: Elements) -> tuple[bytes, int]:
    changed = old != new
    count = int(np.count_nonzero(changed))
    if not count:
        return _HEAD.pack(0, 0, 0), 0
    where, at = write_positions(changed)
    what, written = write_symbols(encoding.symbols(old[changed], new[changed]))
    return _HEAD.pack(count, where, what) + join([*at, *written]), count
