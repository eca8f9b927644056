"""Streams of bytes, each compressed by itself: bytes of one meaning lie together, so that one code fits them all.

A stream is one zstd frame, tuned for its entropy coder: symbols here hardly ever repeat as strings, and the short
matches that zstd would find cost more than the bytes in them. So matches are long or none.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

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
    """The frames of all streams, each behind its length. A stream has less than 4 GiB."""
    compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
    frames = [compressor.compress(np.ascontiguousarray(stream).data) for stream in streams]
    return b"".join(part for frame in frames for part in (_LENGTH.pack(len(frame)), frame))


class Streams:
    """Reads what `join` wrote, one stream after the other. Every departure raises `WeightSyncError`."""

    def __init__(self, data: memoryview, at: int = 0) -> None:
        self._data, self.at = data, at

    def next(self, limit: int) -> Bytes:
        """The next stream, of at most `limit` bytes: nothing larger is unpacked."""
        frame = self.take(self.take_length())
        try:
            size = zstandard.frame_content_size(frame)
            if not 0 <= size <= limit:
                raise WeightSyncError(
                    f"got a stream of {size} bytes where at most {limit} can be; the patch is damaged"
                )
            content = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size)
        except zstandard.ZstdError as error:
            raise WeightSyncError(f"got a stream that is not zstd ({error}); the patch is damaged") from error
        return np.frombuffer(content, np.uint8)

    def take_length(self) -> int:
        (length,) = _LENGTH.unpack(self.take(_LENGTH.size))
        return int(length)

    def take(self, size: int) -> memoryview:
        """The next bytes as they are."""
        part = self._data[self.at : self.at + size]
        if len(part) != size:
            raise WeightSyncError(f"got a patch that ends at byte {len(self._data)}, before its content does")
        self.at += size
        return part


def split_planes(values: NDArray[np.unsignedinteger]) -> list[Bytes]:
    """The lowest bytes of all values, then the next ones, and so on."""
    rows = values.astype(values.dtype.newbyteorder("<"), copy=False).view(np.uint8).reshape(-1, values.dtype.itemsize)
    return [np.ascontiguousarray(rows[:, byte]) for byte in range(values.dtype.itemsize)]


def join_planes(planes: Sequence[Bytes], dtype: np.dtype[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """The values of `split_planes`."""
    rows = np.stack(list(planes), axis=1)
    return np.ascontiguousarray(rows).view(dtype.newbyteorder("<")).reshape(-1).astype(dtype, copy=False)
