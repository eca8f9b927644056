"""Encodings of a delta: exact on any bytes, near the entropy bound, and a damaged patch is an error."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.core.errors import WeightSyncError
from slime.settings.fields import declared
from slime.weights.delta import encodings
from slime.weights.delta.encodings import ENCODINGS, apply, encode
from slime.weights.delta.folder import CHECKSUMS, checksum, missing
from slime.weights.transports.disk import DiskTransport

NAMES = tuple(ENCODINGS)
SIZE = 50_000


def changed(density: float, *, size: int = SIZE, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """bfloat16 bit patterns before and after a step that moves some by one place up or down."""
    rng = np.random.default_rng(seed)
    old = ((rng.standard_normal(size) * 0.02).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    steps = np.where(rng.random(size) < 0.5, 1, -1).astype(np.int16)
    new = np.where(rng.random(size) < density, (old.view(np.int16) + steps).view(np.uint16), old)
    return old.view(np.uint8), new.view(np.uint8)


def returned(name: str, old: np.ndarray, new: np.ndarray, width: int) -> np.ndarray:
    patch, _ = encode(name, old, new, width)
    data = old.copy()
    apply(name, data, patch, width)
    return data


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), width=st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=3 * settings().max_examples)
def test_any_bytes_become_any_others(name: str, data: st.DataObject, width: int) -> None:
    """Law: applied to the old bytes, the patch gives the new ones: all of them, none of them, NaNs, signed zeros."""
    num = data.draw(st.integers(0, 60))
    old = np.frombuffer(data.draw(st.binary(min_size=num * width, max_size=num * width)), np.uint8)
    new = old.copy()
    for at in data.draw(st.lists(st.integers(0, max(0, num * width - 1)), max_size=8)) if num else []:
        new[at] = data.draw(st.integers(0, 255))
    assert (returned(name, old, new, width) == new).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("density", [0.0, 2e-5, 3e-4, 5e-3, 0.03, 0.1, 0.2, 0.6, 0.95, 1.0])
def test_every_form_of_positions_is_exact(name: str, density: float) -> None:
    old, new = changed(density)
    assert (returned(name, old, new, 2) == new).all()


@pytest.mark.parametrize("name", NAMES)
def test_chunks_and_clusters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes in a few rows far apart, a chunk without changes between them, and one that is not full."""
    monkeypatch.setattr(encodings, "CHUNK", 1000)
    old = np.zeros(2 * 4_321, np.uint8)
    new = old.copy()
    new[200:260] = 7
    new[-3:] = 9
    patch, num_changed = encode(name, old, new, 2)
    assert num_changed == 30 + 2 and (returned(name, old, new, 2) == new).all() and len(patch) < 300


def test_overwrite_may_be_applied_twice_and_xor_undoes_itself() -> None:
    old, new = changed(0.05)
    for name, want in (("overwrite", new), ("xor", old)):
        patch, _ = encode(name, old, new, 2)
        data = old.copy()
        apply(name, data, patch, 2)
        apply(name, data, patch, 2)
        assert (data == want).all()


@pytest.mark.parametrize("density", [0.003, 0.01, 0.03, 0.1, 0.3, 0.6])
def test_xor_is_within_a_tenth_of_its_entropy(density: float) -> None:
    """Law: positions and symbols cost at most 1.1 times what a perfect code of each would."""
    old, new = changed(density, size=1_000_000)
    symbols = old.view(np.uint16) ^ new.view(np.uint16)
    symbols = symbols[symbols != 0]
    share = len(symbols) / 1_000_000
    _, counts = np.unique(symbols, return_counts=True)
    bits = -1_000_000 * (share * np.log2(share) + (1 - share) * np.log2(1 - share))
    bits -= (counts * np.log2(counts / len(symbols))).sum()
    patch, _ = encode("xor", old, new, 2)
    assert len(patch) <= 1.1 * bits / 8


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_piece_is_refused_or_changes_only_its_tensor(name: str) -> None:
    """Law: whatever the bytes say, nothing but `WeightSyncError` is raised, and nothing outside is written."""
    old, new = changed(0.02, size=4_000)
    patch, _ = encode(name, old, new, 2)
    rng = np.random.default_rng(3)
    refused = 0
    for _ in range(300):
        bad = bytearray(patch)
        bad[rng.integers(len(bad))] ^= 1 << rng.integers(8)
        around = np.full(len(old) + 64, 165, np.uint8)
        around[32:-32] = old
        try:
            apply(name, around[32:-32], bytes(bad), 2)
        except WeightSyncError:
            refused += 1
        assert (around[:32] == 165).all() and (around[-32:] == 165).all()
    assert refused > 100
    for length in range(0, len(patch), 97):
        with pytest.raises(WeightSyncError):
            apply(name, old.copy(), patch[:length] or b"\0", 2)


def test_an_unknown_encoding_is_refused_and_names_no_code() -> None:
    with pytest.raises(WeightSyncError, match=r"unknown patch encoding os\.system"):
        apply("os.system", np.zeros(4, np.uint8), b"1234", 2)


@pytest.mark.parametrize("name", [name for name in CHECKSUMS if missing(name) is None])
def test_every_single_bit_changes_a_checksum(name: str) -> None:
    data = bytearray(np.random.default_rng(0).bytes(512))
    want = checksum(name, bytes(data))
    for bit in range(len(data) * 8):
        data[bit // 8] ^= 1 << bit % 8
        assert checksum(name, bytes(data)) != want
        data[bit // 8] ^= 1 << bit % 8


def test_the_flags_offer_what_there_is() -> None:
    fields = DiskTransport.__dataclass_fields__
    assert declared(fields["update_weight_delta_encoding"]).choices == NAMES
    assert declared(fields["update_weight_delta_checksum"]).choices == CHECKSUMS
