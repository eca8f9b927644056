"""A safetensors file whose tensors are views of a mapping, and whose memory can be given back while it is open.

The library's own reader keeps every page that was read for as long as the file is open.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from pathlib import Path

import torch
from torch import Tensor

from slime.core.errors import CheckpointError

MAX_HEADER_BYTES = 100 * 1000**2
"""Of a safetensors file, as its library allows."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""As safetensors files name them."""


class TensorFile:
    """A mapped safetensors file. Raises `CheckpointError` that names it if it is damaged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            (size,) = struct.unpack_from("<Q", self._map)
            if size > MAX_HEADER_BYTES:
                raise ValueError(f"its header claims {size} bytes")
            header = json.loads(self._map[8 : 8 + size])
            self._tensors = {
                name: (DTYPES[t["dtype"]], [int(n) for n in t["shape"]], 8 + size + int(t["data_offsets"][0]))
                for name, t in header.items()
                if name != "__metadata__"
            }
            end = 8 + size
            for dtype, shape, start in sorted(self._tensors.values(), key=lambda t: (t[2], math.prod(t[1]))):
                if start != end:
                    raise ValueError(f"a tensor begins at byte {start} and not at {end}")
                end += math.prod(shape) * dtype.itemsize
            if end != len(self._map):
                raise ValueError(f"it has {len(self._map)} bytes and not {end}")
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise CheckpointError(
                f"got {path}, which is missing or no whole safetensors file ({error}); fetch or export it again"
            ) from error

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors of the file."""
        return tuple(self._tensors)

    def read(self, name: str) -> Tensor:
        """A view of the mapping; what is written to it is lost at the next release."""
        if name not in self._tensors:
            raise CheckpointError(f"got {self._path} without {name}; it is damaged, load or fetch another one")
        dtype, shape, start = self._tensors[name]
        if not math.prod(shape):
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=math.prod(shape), offset=start).view(shape)

    def release(self) -> None:
        """Gives back the memory of what was read. Tensors stay valid and are read again."""
        self._map.madvise(mmap.MADV_DONTNEED)
