"""How a patch says what a tensor has become: the registry of encodings, each exact on the bytes.

    xor         new ^ old of the elements that changed: small numbers, of which few are common. Applied twice it undoes
                itself, so it may be applied to its base alone, which the chain of digests sees to.
    overwrite   the elements that changed, as they are now: larger, and the same however often it is applied

A patch is a row of chunks, each of `CHUNK` elements: a head, the streams of positions, the streams of symbols.
An encoding of a manifest is looked up by its name here and nowhere else: a folder that others may write names no code.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slime.core.errors import WeightSyncError
from slime.weights.delta import positions, symbols
from slime.weights.delta.planes import Bytes, Streams, join

Elements = NDArray[np.unsignedinteger]
CHUNK = 1 << 24
"""Elements that are encoded together: bounds the memory beside the tensor."""
_HEAD = struct.Struct("<IBB")
"""Changed elements, form of their positions, form of their symbols."""
RAW = "raw"
"""Of a patch that is the tensor itself: in full versions, and where a tensor changed so much that nothing is gained."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """One way; arguments are elements of unsigned integers."""

    symbols: Callable[[Elements, Elements], Elements]
    """(old, new), of the changed elements -> what is written."""
    values: Callable[[Elements, Elements], Elements]
    """(old, symbols) -> new."""


ENCODINGS: Mapping[str, Encoding] = {
    "xor": Encoding(symbols=np.bitwise_xor, values=np.bitwise_xor),
    "overwrite": Encoding(symbols=lambda old, new: new, values=lambda old, written: written),
}
"""By the name in `--update-weight-delta-encoding` and in manifests."""


def elements(data: Bytes, width: int) -> Elements:
    """Bytes as unsigned integers of `width` bytes: a view."""
    return data.view(np.dtype(f"<u{width}"))


def encode(name: str, old: Bytes, new: Bytes, width: int) -> tuple[bytes, int]:
    """The patch that turns `old` into `new`, flat bytes of equal length, and how many elements changed. `width`: bytes
    of an element. Empty if nothing changed.
    """
    assert len(old) == len(new), f"{len(old)} bytes became {len(new)}"
    was, now = elements(old, width), elements(new, width)
    chunks = [_chunk(ENCODINGS[name], was[i : i + CHUNK], now[i : i + CHUNK]) for i in range(0, len(was), CHUNK)]
    num_changed = sum(count for _, count in chunks)
    return b"".join(data for data, _ in chunks) if num_changed else b"", num_changed


def apply(name: str, data: Bytes, patch: bytes | memoryview, width: int) -> None:
    """Turns the old bytes of a tensor into the new ones, in place. Raises `WeightSyncError` for a damaged patch, after
    which `data` may be anything."""
    if name not in ENCODINGS:
        raise WeightSyncError(f"got a patch in the encoding {name}; this reads {', '.join(ENCODINGS)}")
    if not patch:
        return
    streams, now = Streams(memoryview(patch)), elements(data, width)
    for start in range(0, len(now), CHUNK):
        part = now[start : start + CHUNK]
        count, where, what = _HEAD.unpack(streams.take(_HEAD.size))
        if count > len(part):
            raise WeightSyncError(f"got {count} changes of {len(part)} elements; the patch is damaged")
        if not count:
            continue
        at = positions.read(where, streams, count, len(part))
        part[at] = ENCODINGS[name].values(part[at], symbols.read(what, streams, count, part.dtype.newbyteorder("=")))
    if streams.at != len(patch):
        raise WeightSyncError(f"got a patch of {len(patch)} bytes, of which {streams.at} belong to the tensor")


def _chunk(encoding: Encoding, old: Elements, new: Elements) -> tuple[bytes, int]:
    changed = old != new
    count = int(np.count_nonzero(changed))
    if not count:
        return _HEAD.pack(0, 0, 0), 0
    where, at = positions.write(changed)
    what, written = symbols.write(encoding.symbols(old[changed], new[changed]))
    return _HEAD.pack(count, where, what) + join([*at, *written]), count
