"""The digest of GPUs, by its formula in plain integers: parts of any lengths give that of the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.serving import tensor_hash
from slime.serving.tensor_hash import TILE_WORDS, TileHasher, finish_all, read_all, recording

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


def test_tables_of_recorded_kernel_calls_are_written_in_places_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernel calls that are repeated later read rows that nothing else writes to."""
    monkeypatch.setattr(tensor_hash, "MAX_ROWS", 5)
    device, rows = torch.device("cpu"), [(1, 2, 3, 4, 5), (6, 7, 8, 9, 10)]
    with recording(device) as kept:
        first, second = tensor_hash._table(rows, device), tensor_hash._table(rows[::-1], device)
        with pytest.raises(ValueError, match="more than 5 rows"):
            tensor_hash._table(rows, device)
    assert first.tolist() == [list(row) for row in rows] and second.tolist() == first.flip(0).tolist() and kept
    with recording(device), pytest.raises(ValueError, match="whole words"):
        hashed([3])
    assert hashed([3]) == WHOLE
