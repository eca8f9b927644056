"""The digest of GPUs, by its formula in plain integers: parts of any lengths give that of the whole."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.serving.tensor_hash import TILE_WORDS, TileHasher, finish_all, read_all

CONTENT = torch.randint(0, 256, (4 * TILE_WORDS * 2 + 4 * 137 + 2,), generator=torch.Generator().manual_seed(1)).to(
    torch.uint8
)


def hashed(cuts: list[int], length: int = len(CONTENT)) -> str:
    hasher = TileHasher()
    for start, end in zip([0, *cuts], [*cuts, length], strict=True):
        hasher.add([CONTENT[start:end]])
        read_all([hasher])
    return hasher.finish()


WHOLE = hashed([])


@given(st.lists(st.integers(0, len(CONTENT)), max_size=5))
def test_parts_give_the_digest_of_the_whole(cuts: list[int]) -> None:
    assert hashed(sorted(cuts)) == WHOLE


@given(st.integers(0, len(CONTENT) - 1), st.integers(0, 7))
def test_one_bit_is_noticed(place: int, bit: int) -> None:
    hasher, changed = TileHasher(), CONTENT.clone()
    changed[place] ^= 1 << bit
    hasher.add([changed])
    assert hasher.finish() != WHOLE


def test_two_tiles_that_change_places_are_noticed_and_so_is_a_length() -> None:
    tile = 4 * TILE_WORDS
    hasher = TileHasher()
    hasher.add([CONTENT[tile : 2 * tile], CONTENT[:tile], CONTENT[2 * tile :]])
    assert hasher.finish() != WHOLE
    assert len({hashed([], length) for length in (4, 8, tile, 2 * tile)}) == 4


@given(st.lists(st.tuples(st.integers(0, len(CONTENT)), st.integers(0, len(CONTENT))), max_size=4))
def test_several_that_are_finished_together_have_their_own_digests(parts: list[tuple[int, int]]) -> None:
    """Law: cut where it may be, a digest is that of its tensor alone."""
    hashers = []
    for cut, length in parts:
        hashers.append(TileHasher())
        hashers[-1].add([CONTENT[: min(cut, length)], CONTENT[min(cut, length) : length]])
        read_all([hashers[-1]])
    assert finish_all(hashers) == [hashed([], length) for _, length in parts]
