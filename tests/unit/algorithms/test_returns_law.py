"""Returns and GAE: the chunked scan is the serial recursion, and observations take part as documented."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from slime.algorithms.advantages import Spread
from slime.algorithms.advantages.ppo import generalized_advantages
from slime.algorithms.advantages.reinforce import discounted_returns
from slime.algorithms.advantages.returns import (
    Together,
    moments,
    reverse_scan,
    spread_advantage,
    token_rewards,
    whiten,
)
from slime.core.errors import DataError


def _masks(num: int) -> dict[str, np.ndarray]:
    """Masks with an observation nowhere, at the start, in the middle, at the end, everywhere but one, everywhere."""
    masks = {name: np.ones(num) for name in ("none", "start", "middle", "end", "most")} | {"all": np.zeros(num)}
    masks["start"][: num // 3] = 0
    masks["middle"][num // 3 : num // 2] = 0
    masks["end"][num // 2 :] = 0
    masks["most"][1:] = 0
    return masks


def _serial_gae(
    r: np.ndarray, v: np.ndarray, mask: np.ndarray, gamma: float, lambd: float, through: bool
) -> np.ndarray:
    out, next_value, carry = np.zeros(len(r)), 0.0, 0.0
    for t in reversed(range(len(r))):
        if through or mask[t]:
            carry = (r[t] if mask[t] else 0.0) + gamma * next_value - v[t] + gamma * lambd * carry
            next_value, out[t] = v[t], carry
    return out


def _serial_returns(r: np.ndarray, mask: np.ndarray, gamma: float, observations: str) -> np.ndarray:
    out, carry = np.zeros(len(r)), 0.0
    for t in reversed(range(len(r))):
        if mask[t] or observations != "skip":
            carry = (r[t] if mask[t] else 0.0) + gamma * carry
            out[t] = carry
        if not mask[t] and observations == "reset":
            carry = 0.0
    return out


@pytest.mark.parametrize("observations", ["skip", "through"])
@pytest.mark.parametrize("gamma, lambd", [(1.0, 1.0), (0.9, 0.95), (1.0, 0.0), (0.0, 0.5)])
@pytest.mark.parametrize("num", [1, 127, 128, 129, 1000])
def test_gae_is_the_serial_recursion(num: int, gamma: float, lambd: float, observations: str) -> None:
    rng = np.random.default_rng(num)
    r, v = rng.normal(size=num), rng.normal(size=num)
    for name, mask in _masks(num).items():
        advantages, returns = generalized_advantages(r, v, mask, gamma, lambd, observations)
        want = _serial_gae(r, v, mask, gamma, lambd, observations == "through")
        assert np.abs(advantages - want).max() < 1e-9, name
        live = mask > 0 if observations == "skip" else np.ones(num, bool)
        assert returns == pytest.approx(np.where(live, want + v, 0.0), abs=1e-9), name


@pytest.mark.parametrize("chunk", [2, 7, 128, 4096])
def test_the_chunk_changes_nothing(chunk: int) -> None:
    x = np.random.default_rng(3).normal(size=1001)
    serial = _serial_returns(x, np.ones(len(x)), 0.99, "through")
    assert np.abs(reverse_scan(x, 0.99, chunk) - serial).max() < 1e-9
    assert len(reverse_scan(x[:0], 0.99, chunk)) == 0


@pytest.mark.parametrize("observations", ["skip", "through", "reset"])
@pytest.mark.parametrize("num", [1, 5, 300])
def test_returns_are_the_serial_recursion(num: int, observations: str) -> None:
    r = np.random.default_rng(num).normal(size=num)
    for name, mask in _masks(num).items():
        got = discounted_returns(r, mask, 0.97, observations)
        assert np.abs(got - _serial_returns(r, mask, 0.97, observations)).max() < 1e-9, name


def test_the_score_is_at_the_last_trained_token_and_the_penalty_at_each() -> None:
    mask, kl = np.array([1, 0, 1, 0]), np.array([0.5, 9.0, 0.25, 9.0])
    assert token_rewards(2.0, mask, kl, 0.1).tolist() == pytest.approx([-0.05, 0.0, 1.975, 0.0])
    assert token_rewards(2.0, np.zeros(3)).tolist() == [0.0, 0.0, 0.0]
    assert spread_advantage(2.0, mask, kl, 0.1).tolist() == pytest.approx([1.95, 0.0, 1.975, 0.0])
    assert spread_advantage(2.0, mask).tolist() == [2.0, 0.0, 2.0, 0.0]


def test_what_cannot_be_computed_is_refused() -> None:
    one = np.ones(1)
    with pytest.raises(DataError, match="unscored"):
        token_rewards(float("nan"), one)
    with pytest.raises(AssertionError, match="reset"):
        generalized_advantages(one, one, one, 1.0, 1.0, cast(Any, "reset"))
    with pytest.raises(AssertionError, match="forget"):
        discounted_returns(one, one, 1.0, cast(Any, "forget"))


@pytest.mark.parametrize("size", [2, 3, 40])
def test_ranks_that_divide_the_statistics_get_the_same_bits(size: int) -> None:
    rng = np.random.default_rng(7)
    masks = [(rng.random(n) < 0.8).astype(np.float32) for n in (1, 5, 300, 40, 17_000)] + [np.zeros(4, np.float32)]
    values = tuple(np.where(m > 0, rng.normal(3.0, 1.0, len(m)), 0.0) for m in masks)
    alone, totals = moments(values, masks, beside=[values])
    sums: list[np.ndarray] = []

    def add(own: np.ndarray) -> np.ndarray:
        sums.append(own)
        return own

    for rank in range(size):
        moments(values, masks, beside=[values], together=Together(rank, size, add))
    whole = np.sum(sums, axis=0)
    together, shared = moments(values, masks, beside=[values], together=Together(0, size, lambda own: whole))
    assert (shared == totals).all() and together.mean == alone.mean and together.variation == alone.variation
    trained = np.concatenate([v[m > 0] for v, m in zip(values, masks, strict=True)])
    assert together.mean == pytest.approx(trained.mean(), abs=1e-12)
    assert together.variation == pytest.approx(np.square(trained - trained.mean()).sum(), rel=1e-12)
    assert (together.least.min(), together.largest.max()) == (trained.min(), trained.max())


def test_a_spread_has_the_moments_of_its_arrays() -> None:
    masks = [np.ones(1000, np.float32), np.asarray([0, 1, 0, 1], np.float32), np.zeros(3, np.float32)]
    even = Spread(np.asarray([0.7, -2.0, 0.0]), masks)
    written, lazy = moments(tuple(even), masks)[0], moments(even, masks)[0]
    assert even[1].tolist() == [0.0, -2.0, 0.0, -2.0] and len(even[0:2]) == 2
    assert lazy.mean == pytest.approx(written.mean, rel=1e-14)
    assert lazy.variation == pytest.approx(written.variation, rel=1e-12)
    assert lazy.least.tolist() == written.least.tolist() and lazy.largest.tolist() == written.largest.tolist()
    lazily, eagerly = whiten(even, masks), whiten(tuple(even), masks)
    assert all(np.abs(a - b).max() < 1e-12 for a, b in zip(lazily, eagerly, strict=True))
