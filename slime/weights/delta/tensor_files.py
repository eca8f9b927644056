"""Where tensors lie in safetensors files, so that one can be read and changed where it is."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from slime.core.errors import WeightSyncError

WIDTHS = {"64": 8, "32": 4, "16": 2, "8_": 1, "8": 1, "OL": 1}
"""Bytes of an element, by how the name of its dtype goes on."""
_HEAD = struct.Struct("<Q")
_MOST_HEADER_BYTES = 100 * 1024**2


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    """From the start of the file, in bytes."""
    num_bytes: int


def places(file: Path) -> dict[str, Place]:
    """Name -> place, of all tensors of a file. Raises `WeightSyncError` if it is not one of safetensors."""
    try:
        with file.open("rb") as opened:
            (length,) = _HEAD.unpack(opened.read(_HEAD.size))
            if length > _MOST_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        start = _HEAD.size + length
        return {
            name: Place(
                t["dtype"], tuple(t["shape"]), start + t["data_offsets"][0], t["data_offsets"][1] - t["data_offsets"][0]
            )
            for name, t in header.items()
        }
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise WeightSyncError(
            f"got {file}, which cannot be read as safetensors: {type(error).__name__}: {error}"
        ) from error


def width_of(dtype: str) -> int:
    """Bytes of an element of a safetensors dtype ("BF16", "F8_E4M3", ...)."""
    digits = dtype.lstrip("BFIUCO")
    for ends, width in WIDTHS.items():
        if digits.startswith(ends):
            return width
    return 1
