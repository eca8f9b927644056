"""SGLang's digest of a GPU tensor (`gpu_tensor_hash`, 0.5.16), computed incrementally from consecutive parts.

The tensor is read as 32-bit words (the last one zero-padded), grouped into tiles of 8192 words. Each word is mixed with
its global position in two ways, and each mix is summed over the tile. Both sums are then mixed with the number of bytes
into one 64-bit value per tile, and the sum of these values is mixed once more. Since sums are order-independent,
hashing a part needs only the part's start position and yields two words per tile.

Invariant: the digest does not depend on how the tensor is divided into parts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from slime.weights.hf_shards import byte_runs

TILE_WORDS = 8192
BLOCK_WORDS = 256
STEPS = 12
MAX_PARTS = 2**STEPS
"""Maximum number of parts per kernel call. The kernel finds a tile's part in `STEPS` steps."""
SEED = 0x243F6A88
SECOND_SEED = (SEED * 0x9E3779B1 ^ 0xDEADBEEF) & 0xFFFFFFFF
PLACE_FACTORS = 0x27D4EB2D, 0x165667B1
PLACE_ROTATIONS = 15, 13
MIX_FACTORS = 0x85EBCA6B, 0xC2B2AE35
_WORD = 0xFFFFFFFF


class TileHasher:
    """`core.engine_interface.Hasher` for tensors on a GPU."""

    def __init__(self) -> None:
        self._pending: list[Tensor] = []
        self._num_words = 0
        self._sums: list[Tensor] = []
        """[tiles, 2] int32 for each hashed part. If a part starts inside a tile, its sums include that tile."""
        self._begins: list[int] = []
        """Index of the first tile of each part."""

    def add(self, parts: Sequence[Tensor]) -> None:
        """Keeps the parts, without copying them, until `read_all`, because one kernel call per part is too slow."""
        self._pending += parts

    def take(self, *, last: bool) -> list[tuple[Tensor, int]]:
        """Returns (words [n] int32, position of the first word) of the parts that have not been hashed.

        Keeps a copy of up to three trailing bytes that do not fill a word, unless these are the `last` parts.
        """
        runs = byte_runs(self._pending)
        if any(run.storage_offset() % 4 or run.numel() % 4 for run in runs):
            if _recording is not None:
                raise ValueError("a digest of parts that do not fill whole words cannot be recorded")
            runs = [_joined(runs)]
            rest = runs[0][runs[0].numel() // 4 * 4 :]
            if last and rest.numel():
                runs = [torch.cat([runs[0], rest.new_zeros(4 - rest.numel())])]
            else:
                runs = [runs[0][: runs[0].numel() - rest.numel()]]
                self._pending = [rest.clone()] if rest.numel() else []
        else:
            self._pending = []
        taken = []
        for run in runs:
            if run.numel():
                taken.append((run.view(torch.int32), self._num_words))
                self._num_words += run.numel() // 4
        return taken

    def keep(self, sums: Tensor, begin: int) -> None:
        """Keeps the sums of a part whose first word is at position `begin`."""
        self._begins.append(begin // TILE_WORDS)
        self._sums.append(sums)

    def finish(self) -> str:
        return finish_all([self])[0]

    def found(self) -> tuple[list[Tensor], list[int], int]:
        """Returns each part's sums, each part's first tile, and the number of words."""
        return self._sums, self._begins, self._num_words


def read_all(hashers: Sequence[TileHasher], *, last: bool = False) -> None:
    """Hashes all added parts. On a GPU, one kernel call hashes up to `MAX_PARTS`. `last`: no parts will follow."""
    taken = [(hasher, *part) for hasher in hashers for part in hasher.take(last=last)]
    for start in range(0, len(taken), MAX_PARTS):
        batch = taken[start : start + MAX_PARTS]
        sums = sums_of_parts([(words, begin) for _, words, begin in batch])
        for (hasher, _, begin), one in zip(batch, sums, strict=True):
            hasher.keep(one, begin)


def finish_all(hashers: Sequence[TileHasher]) -> list[str]:
    """Returns 16 hex digits per hasher. Takes a dozen kernel launches and one synchronisation in total."""
    read_all(hashers, last=True)
    parts = [hasher.found() for hasher in hashers]
    num_tiles = [-(-num_words // TILE_WORDS) for _, _, num_words in parts]
    firsts = [0, *itertools.accumulate(num_tiles)]
    sums = [one for own, _, _ in parts for one in own]
    if not sums:
        return [f"{0:016x}"] * len(parts)
    device = sums[0].device
    begins = [first + begin for first, (_, own, _) in zip(firsts, parts, strict=False) for begin in own]
    tiles = torch.zeros(firsts[-1], 2, dtype=torch.int64, device=device)
    tiles.index_add_(0, _ranges(begins, [len(one) for one in sums], device), torch.cat(sums).long() & _WORD)
    lengths = [num_words * 4 & _WORD for _, _, num_words in parts]
    rows = torch.tensor([lengths, range(len(parts)), num_tiles]).to(device)
    lengths_of_tiles, owners = rows[:2].repeat_interleave(rows[2], dim=1, output_size=firsts[-1])
    mixed = _mixed((tiles & _WORD) ^ lengths_of_tiles[:, None])
    totals = torch.zeros(len(parts), dtype=torch.int64, device=device)
    totals.index_add_(0, owners, mixed[:, 0] << 32 | mixed[:, 1])
    return [f"{_mixed_64(total) if count else 0:016x}" for total, count in zip(totals.tolist(), num_tiles, strict=True)]


def _ranges(begins: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tensor:
    """Concatenates the ranges [begin, begin + length)."""
    total = sum(lengths)
    begin, counts = torch.tensor([begins, lengths]).to(device)
    shifts = (begin - counts.cumsum(0) + counts).repeat_interleave(counts, output_size=total)
    return torch.arange(total, device=device) + shifts


def sums_of_parts(parts: Sequence[tuple[Tensor, int]]) -> Sequence[Tensor]:
    """Returns both sums of each tile that a part overlaps: [tiles, 2] int32 per part.

    `parts`: at most `MAX_PARTS`, each (words [n] int32, position of the first word in its tensor), on one device.
    """
    if not parts:
        return ()
    counts = [(begin % TILE_WORDS + words.numel() - 1) // TILE_WORDS + 1 for words, begin in parts]
    device = parts[0][0].device
    if device.type != "cuda":
        return [_tile_sums_in_torch(*part, count) for part, count in zip(parts, counts, strict=True)]
    firsts = list(itertools.accumulate(counts, initial=0))
    rows = [
        (words.data_ptr(), words.numel(), begin % TILE_WORDS, begin - begin % TILE_WORDS, first)
        for (words, begin), first in zip(parts, firsts, strict=False)
    ]
    table = _table(rows, device)
    sums = torch.empty(firsts[-1], 2, dtype=torch.int32, device=device)
    _kernel()[(firsts[-1],)](table, sums, len(parts), num_warps=4)
    return sums.split(counts)


MAX_ROWS = 1 << 18
"""Largest number of parts that the kernel calls of all graphs can hash (10 MB of tables)."""


class _Tables:
    """The tables of the kernel calls that CUDA graphs contain.

    A graph cannot read host memory that is gone, and its own memory is overwritten by its other work, and by other
    graphs. So the tables lie outside of it, and their rows are written after it was recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(MAX_ROWS, 5, dtype=torch.int64, device=device)
        self._rows: list[tuple[int, ...]] = []

    def take(self, rows: Sequence[tuple[int, ...]]) -> Tensor:
        """Returns the place of these rows, [parts, 5] int64. Raises `ValueError` if there is no room for them."""
        begin, end = len(self._rows), len(self._rows) + len(rows)
        if end > len(self._memory):
            raise ValueError(f"the tables of all digests have more than {len(self._memory)} rows")
        self._rows += rows
        return self._memory[begin:end]

    def write(self) -> None:
        if self._rows:
            self._memory[: len(self._rows)].copy_(torch.tensor(self._rows, dtype=torch.int64))


_recording: _Tables | None = None


@contextmanager
def recording(device: torch.device) -> Iterator[object]:
    """See `core.engine_interface.Digest.recording`. One thread at a time."""
    global _recording
    assert _recording is None, "another thread is recording"
    tables = _recording = _Tables(device)
    try:
        yield tables
    finally:
        _recording = None
    tables.write()


def _table(rows: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """Returns the rows on the device, [parts, 5] int64."""
    if _recording is not None:
        return _recording.take(rows)
    return torch.tensor(rows, dtype=torch.int64).pin_memory().to(device, non_blocking=True)


@functools.cache
def _kernel() -> Any:
    from slime.serving.tensor_hash_kernel import sums_of_parts_kernel

    return sums_of_parts_kernel


def _tile_sums_in_torch(words: Tensor, begin: int, num_tiles: int) -> Tensor:
    """Computes the sums of one part in 64-bit integers. Used on CPUs and as the reference for the kernel."""
    place = torch.arange(begin, begin + words.numel(), device=words.device) & _WORD
    tile = place.new_tensor(range(num_tiles)).repeat_interleave(TILE_WORDS)[begin % TILE_WORDS :][: words.numel()]
    sums = torch.zeros(num_tiles, 2, dtype=torch.int64, device=words.device)
    for way, (factor, turn, seed) in enumerate(zip(PLACE_FACTORS, PLACE_ROTATIONS, (SEED, SECOND_SEED), strict=True)):
        rotated = (place << turn | place >> 32 - turn) & _WORD
        mixed = _mixed((words.long() & _WORD) ^ ((place * factor + seed) & _WORD) ^ rotated)
        sums[:, way].index_add_(0, tile, mixed)
    low = sums & _WORD
    return torch.where(low > 0x7FFFFFFF, low - 2**32, low).to(torch.int32)


def _mixed(x: Tensor) -> Tensor:
    """Applies MurmurHash3's 32-bit finalizer, in int64."""
    x = (x ^ x >> 16) * MIX_FACTORS[0] & _WORD
    x = (x ^ x >> 13) * MIX_FACTORS[1] & _WORD
    return x ^ x >> 16


def _mixed_64(x: int) -> int:
    """Applies SplitMix64's finalizer."""
    mask = 2**64 - 1
    x &= mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31


def _joined(runs: Sequence[Tensor]) -> Tensor:
    """Returns the bytes of all runs as one tensor, aligned for 32-bit words."""
    flat = torch.cat(list(runs)) if len(runs) > 1 else runs[0]
    return flat.clone() if flat.storage_offset() % 4 else flat
