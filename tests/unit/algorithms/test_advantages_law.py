"""Advantages: groups by prompt id, an execution counts once, no comparison means exactly zero."""

from __future__ import annotations

from typing import Any, cast, get_args

import numpy as np
import pytest

from slime.algorithms.advantages.grpo import STD_EPSILON, Scale, group_advantages, leave_one_out
from slime.algorithms.advantages.returns import whiten

NAN = float("nan")
ESTIMATORS = [*get_args(Scale), "leave_one_out"]


def _advantages(rewards: list[float], groups: list[int], executions: list[int], kind: str) -> np.ndarray:
    if kind == "leave_one_out":
        return leave_one_out(rewards, groups, executions)
    return group_advantages(rewards, groups, executions, scale=kind)


def test_normalised_within_the_group_whatever_the_order() -> None:
    rewards = [1.0, 5.0, 0.0, 7.0]
    groups = [3, 9, 3, 9]
    got = group_advantages(rewards, groups, [0, 1, 2, 3], scale="none")
    assert got.tolist() == [0.5, -1.0, -0.5, 1.0]


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_the_order_of_the_batch_changes_nothing(kind: str) -> None:
    rng = np.random.default_rng(1)
    rewards, groups, executions = rng.random(24), np.repeat([7, 3, 3, 5], 6), np.repeat(np.arange(12), 2)
    order = rng.permutation(24)
    got = _advantages(rewards.tolist(), groups.tolist(), executions.tolist(), kind)
    permuted = _advantages(rewards[order].tolist(), groups[order].tolist(), executions[order].tolist(), kind)
    assert permuted == pytest.approx(got[order], abs=1e-12)


def test_standard_deviation_is_unbiased_with_epsilon() -> None:
    rewards = np.array([0.0, 1.0, 1.0, 0.0])
    got = group_advantages(rewards, [0] * 4, range(4))
    assert got == pytest.approx((rewards - 0.5) / (np.std(rewards, ddof=1) + STD_EPSILON))


def test_batch_scale_divides_by_the_deviation_of_all_executions() -> None:
    rewards = np.array([0.0, 1.0, 5.0, 9.0])
    got = group_advantages(rewards, [0, 0, 1, 1], range(4), scale="batch")
    assert got == pytest.approx(np.array([-0.5, 0.5, -2.0, 2.0]) / (np.std(rewards, ddof=1) + STD_EPSILON))


def test_leave_one_out_compares_with_the_mean_of_the_others() -> None:
    rewards = [1.0, 2.0, 6.0]
    assert leave_one_out(rewards, [0] * 3, range(3)) == pytest.approx(np.array([1 - 4.0, 2 - 3.5, 6 - 1.5]))


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_equal_rewards_and_groups_of_one_are_exactly_zero(kind: str) -> None:
    assert _advantages([0.7] * 8 + [42.0], [0] * 8 + [1], list(range(9)), kind).tolist() == [0.0] * 9


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_equal_executions_are_exactly_zero_though_the_mean_of_their_samples_rounds(kind: str) -> None:
    assert np.mean([0.1, 0.2, 0.3]) != 0.2
    assert _advantages([0.1, 0.2, 0.3, 0.2], [0] * 4, [0, 0, 0, 1], kind).tolist() == [0.0] * 4


@pytest.mark.parametrize("kind", ["group", "none", "leave_one_out"])
def test_siblings_of_one_execution_count_once(kind: str) -> None:
    plain = _advantages([1.0, 0.0, 0.0], [0, 0, 0], [0, 1, 2], kind)
    fanned = _advantages([1.0, 1.0, 1.0, 0.0, 0.0], [0] * 5, [0, 0, 0, 1, 2], kind)
    assert fanned[[0, 3, 4]].tolist() == plain.tolist()
    assert fanned[0] == fanned[1] == fanned[2]


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_one_execution_with_unequal_siblings_is_no_comparison(kind: str) -> None:
    assert _advantages([1.0, 0.0], [0, 0], [5, 5], kind).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_an_unscored_reward_is_excluded_and_has_no_advantage(kind: str) -> None:
    scored = _advantages([1.0, 0.0, 0.5, 2.0], [0, 0, 0, 1], [0, 1, 2, 3], kind)
    got = _advantages([1.0, NAN, 0.0, 0.5, 2.0, NAN], [0, 0, 0, 0, 1, 1], [0, 9, 1, 2, 3, 8], kind)
    assert got[[0, 2, 3, 4]].tolist() == scored.tolist()
    assert got[[1, 5]].tolist() == [0.0, 0.0]
    assert _advantages([NAN, NAN], [0, 0], [0, 1], kind).tolist() == [0.0, 0.0]


def test_an_unknown_scale_is_refused() -> None:
    with pytest.raises(AssertionError, match="median"):
        group_advantages([1.0], [0], [0], scale=cast(Any, "median"))


def test_whitening_is_over_tokens() -> None:
    counts = [1, 3, 6]
    got = whiten([np.full(n, a) for n, a in zip(counts, (1.0, -2.0, 0.5), strict=True)], [np.ones(n) for n in counts])
    tokens = np.concatenate(got)
    assert tokens.mean() == pytest.approx(0.0, abs=1e-12)
    assert tokens.var(ddof=1) == pytest.approx(1.0, rel=1e-6)


def test_whitening_of_one_token_of_none_and_of_equal_ones_is_zero() -> None:
    assert whiten([np.array([3.0])], [np.ones(1)])[0].tolist() == [0.0]
    assert whiten([np.full(2, 0.7), np.full(5, 0.7)], [np.ones(2), np.ones(5)])[1].tolist() == [0.0] * 5
    assert len(whiten([], [])) == 0


@pytest.mark.parametrize("offset", [0.0, 10.0, 100.0, 1e3, 1e4])
def test_whitening_holds_at_every_offset(offset: float) -> None:
    values = (np.random.default_rng(0).normal(0, 0.1, 4096) + offset).astype(np.float32)
    got = np.concatenate(whiten(np.split(values, 8), [np.ones(512)] * 8))
    exact = values.astype(np.longdouble)
    centred = exact - exact.mean()
    want = centred / np.sqrt((centred**2).sum() / 4095)
    assert np.abs(got - want).max() < 1e-4
    assert got.std(ddof=1) == pytest.approx(1.0, abs=1e-4)


def test_whitening_does_not_depend_on_the_order_of_the_samples() -> None:
    parts = [np.random.default_rng(i).random(3 + i) * 1e3 for i in range(9)]
    masks = [np.ones(len(p)) for p in parts]
    forward, backward = whiten(parts, masks), whiten(parts[::-1], masks[::-1])[::-1]
    assert all((a == b).all() for a, b in zip(forward, backward, strict=True))
