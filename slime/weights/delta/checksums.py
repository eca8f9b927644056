"""Checksums of patches and of whole tensors, by the names of `--update-weight-delta-checksum`."""

from __future__ import annotations

import importlib.util
import zlib
from typing import Any, Literal, get_args

from numpy.typing import NDArray

from slime.core.errors import ConfigError

Buffer = bytes | memoryview | NDArray[Any]
Checksum = Literal["xxh3-128", "blake3", "adler32"]
CHECKSUMS: tuple[str, ...] = get_args(Checksum)
"""xxh3-128 is as fast as memory; blake3 is cryptographic and a package of its own; adler32 is in the standard library,
and 32 bits wide."""


def checksum(name: str, data: Buffer) -> str:
    """Hex digest of `data`. Raises `ConfigError` for a name that is none of `CHECKSUMS`, or cannot be had here."""
    content = data if isinstance(data, bytes | memoryview) else data.data
    if name == "xxh3-128":
        import xxhash

        return xxhash.xxh3_128_hexdigest(content)
    if name == "adler32":
        return f"{zlib.adler32(content):08x}"
    if problem := missing(name):
        raise ConfigError(problem)
    import blake3

    found: str = blake3.blake3(content).hexdigest()
    return found


def missing(name: str) -> str | None:
    """Why a checksum cannot be computed on this machine; None if it can."""
    if name not in CHECKSUMS:
        return f"got the checksum {name}, which nobody here can compute; use one of {', '.join(CHECKSUMS)}"
    if name == "blake3" and importlib.util.find_spec("blake3") is None:
        return "got --update-weight-delta-checksum blake3 without its package; pip install blake3, or use xxh3-128"
    return None
