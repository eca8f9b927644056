"""The Triton kernel of `tensor_hash`. In a separate file because Triton is imported only on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl

from slime.serving import tensor_hash

TILE: tl.constexpr = tl.constexpr(tensor_hash.TILE_WORDS)
STEPS: tl.constexpr = tl.constexpr(tensor_hash.STEPS)
BLOCK: tl.constexpr = tl.constexpr(tensor_hash.BLOCK_WORDS)
SEED_1: tl.constexpr = tl.constexpr(tensor_hash.SEED)
SEED_2: tl.constexpr = tl.constexpr(tensor_hash.SECOND_SEED)
FACTOR_1: tl.constexpr = tl.constexpr(tensor_hash.PLACE_FACTORS[0])
FACTOR_2: tl.constexpr = tl.constexpr(tensor_hash.PLACE_FACTORS[1])
TURN_1: tl.constexpr = tl.constexpr(tensor_hash.PLACE_ROTATIONS[0])
TURN_2: tl.constexpr = tl.constexpr(tensor_hash.PLACE_ROTATIONS[1])
MIX_1: tl.constexpr = tl.constexpr(tensor_hash.MIX_FACTORS[0])
MIX_2: tl.constexpr = tl.constexpr(tensor_hash.MIX_FACTORS[1])


@triton.jit
def _mixed(x):  # type: ignore[no-untyped-def]
    x ^= x >> 16
    x *= tl.full((), MIX_1, tl.uint32)
    x ^= x >> 13
    x *= tl.full((), MIX_2, tl.uint32)
    x ^= x >> 16
    return x


@triton.jit
def _at(place, FACTOR: tl.constexpr, SEED: tl.constexpr, TURN: tl.constexpr):  # type: ignore[no-untyped-def]
    rotated = (place << TURN) | (place >> (32 - TURN))
    return (place * tl.full((), FACTOR, tl.uint32) + tl.full((), SEED, tl.uint32)) ^ rotated


@triton.jit(do_not_specialize=["num_parts"])
def sums_of_parts_kernel(table, sums, num_parts):  # type: ignore[no-untyped-def]
    """Runs one program per tile.

    `table` [parts, 5] int64 has each part's address, number of words, the number of words of its first tile that
    precede it, the position of that tile's first word in the full tensor, and the number of tiles before this part.
    """
    tile = tl.program_id(0)
    part = 0
    above = num_parts
    for _ in tl.static_range(STEPS):  # the last part that begins at this tile or before it
        middle = (part + above) // 2
        here = tl.load(table + middle * 5 + 4) <= tile
        part = tl.where(here, middle, part)
        above = tl.where(here, above, middle)
    words = tl.load(table + part * 5).to(tl.pointer_type(tl.int32))
    num_words = tl.load(table + part * 5 + 1)
    skipped = tl.load(table + part * 5 + 2)
    first_place = tl.load(table + part * 5 + 3)
    base = (tile - tl.load(table + part * 5 + 4)) * TILE
    sum_1 = tl.zeros((), dtype=tl.uint32)
    sum_2 = tl.zeros((), dtype=tl.uint32)
    for offset in tl.static_range(0, TILE, BLOCK):
        in_tiles = base + offset + tl.arange(0, BLOCK)
        index = in_tiles - skipped
        there = (index >= 0) & (index < num_words)
        word = tl.load(words + index, mask=there, other=0, cache_modifier=".cg").to(tl.uint32, bitcast=True)
        place = (in_tiles + first_place).to(tl.uint32)
        mixed_1 = tl.where(there, _mixed(word ^ _at(place, FACTOR_1, SEED_1, TURN_1)), tl.zeros_like(place))
        mixed_2 = tl.where(there, _mixed(word ^ _at(place, FACTOR_2, SEED_2, TURN_2)), tl.zeros_like(place))
        sum_1 += tl.sum(mixed_1, axis=0).to(tl.uint32)
        sum_2 += tl.sum(mixed_2, axis=0).to(tl.uint32)
    tl.store(sums + 2 * tile, sum_1.to(tl.int32, bitcast=True))
    tl.store(sums + 2 * tile + 1, sum_2.to(tl.int32, bitcast=True))
