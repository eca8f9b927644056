"""Advantages: groups by prompt id, an execution counts once, no comparison means exactly zero."""

from __future__ import annotations

import numpy as np
import pytest

from slime.algorithms.advantages import STD_EPSILON, group_advantages, whiten


def test_normalised_within_the_group_whatever_the_order() -> None:
    rewards = [1.0, 5.0, 0.0, 7.0]
    groups = [3, 9, 3, 9]
    got = group_advantages(rewards, groups, [0, 1, 2, 3], normalize_std=False)
    assert got.tolist() == [0.5, -1.0, -0.5, 1.0]
    order = [2, 0, 3, 1]
    permuted = group_advantages([rewards[i] for i in order], [groups[i] for i in order], order, normalize_std=False)
    assert permuted.tolist() == got[order].tolist()


def test_standard_deviation_is_unbiased_with_epsilon() -> None:
    rewards = np.array([0.0, 1.0, 1.0, 0.0])
    got = group_advantages(rewards, [0] * 4, range(4), normalize_std=True)
    assert got == pytest.approx((rewards - 0.5) / (np.std(rewards, ddof=1) + STD_EPSILON))


@pytest.mark.parametrize("normalize_std", [True, False])
def test_equal_rewards_and_groups_of_one_are_exactly_zero(normalize_std: bool) -> None:
    rewards = [0.1, 0.1, 0.1, 42.0]
    got = group_advantages(rewards, [0, 0, 0, 1], [0, 1, 2, 3], normalize_std=normalize_std)
    assert got.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_siblings_of_one_execution_count_once() -> None:
    plain = group_advantages([1.0, 0.0, 0.0], [0, 0, 0], [0, 1, 2], normalize_std=True)
    fanned = group_advantages([1.0, 1.0, 1.0, 0.0, 0.0], [0] * 5, [0, 0, 0, 1, 2], normalize_std=True)
    assert fanned[[0, 3, 4]].tolist() == plain.tolist()
    assert fanned[0] == fanned[1] == fanned[2]


def test_one_execution_with_unequal_siblings_is_no_comparison() -> None:
    assert group_advantages([1.0, 0.0], [0, 0], [5, 5], normalize_std=True).tolist() == [0.0, 0.0]


def test_whitening_is_over_tokens() -> None:
    counts = [1, 3, 6]
    got = whiten(np.array([1.0, -2.0, 0.5]), counts)
    tokens = np.repeat(got, counts)
    assert tokens.mean() == pytest.approx(0.0, abs=1e-12)
    assert tokens.var(ddof=1) == pytest.approx(1.0, rel=1e-6)
    assert whiten(np.array([3.0]), [1]).tolist() == [0.0]
