"""DPPO (arXiv:2602.04879) and MaxRL (arXiv:2602.02710) against their formulas, written here without the package."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from slime.algorithms.advantages.grpo import success_advantages
from slime.algorithms.policy_loss.dppo import THRESHOLDS, Divergence, binary_divergence, dppo_loss
from slime.core.errors import DataError


def _t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("old", "new", "tv", "kl"),
    [
        (0.2, 0.3, 0.1, 0.0257321),
        (0.3, 0.2, 0.1, 0.0281676),
        (0.99, 0.8, 0.19, 0.1810050),  # a ratio of 0.81: a likely token
        (0.00001, 0.001, 0.00099, 0.0009444),  # a ratio of 100: a rare one
        (0.5, 0.5, 0.0, 0.0),
    ],
)
def test_the_divergence_is_that_of_a_token_against_all_others(old: float, new: float, tv: float, kl: float) -> None:
    args = _t(math.log(old)), _t(math.log(new))
    assert binary_divergence(*args, "binary_tv").item() == pytest.approx(tv, abs=1e-7)
    assert binary_divergence(*args, "binary_kl").item() == pytest.approx(kl, abs=1e-7)


@pytest.mark.parametrize(
    ("old", "new", "advantage", "loss", "dropped"),
    [
        (0.2, 0.3, 2.0, -3.0, 0.0),  # near enough, though the ratio is 1.5
        (0.2, 0.4, 2.0, 0.0, 1.0),  # too far, and further
        (0.2, 0.4, -2.0, 4.0, 0.0),  # too far, but on the way back
        (0.99, 0.8, -1.0, 0.0, 1.0),  # PPO would keep it: the ratio is above 0.8
        (0.99, 0.8, 1.0, -80 / 99, 0.0),
        (0.00001, 0.001, 1.0, -100.0, 0.0),  # PPO would clip it
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dppo_drops_what_is_far_and_moves_further(
    old: float, new: float, advantage: float, loss: float, dropped: float, dtype: torch.dtype
) -> None:
    log_probs = _t(math.log(new)).to(dtype).requires_grad_()
    got = dppo_loss(log_probs, _t(math.log(old)).to(dtype), _t(advantage).to(dtype), _t(1).to(dtype), threshold=0.15)
    got.loss.sum().backward()
    assert log_probs.grad is not None and got.loss.dtype == dtype
    assert got.loss.item() == pytest.approx(loss, rel=1e-5)
    assert got.clipped.item() == dropped
    assert log_probs.grad.item() == pytest.approx(loss, rel=1e-5), "the gradient of -r A is -r A"


def test_a_certain_token_has_no_divergence_by_rounding() -> None:
    """Law: in float32, a log-prob near 0 is 0, or above it; neither is an infinite KL."""
    for kind in THRESHOLDS:
        assert binary_divergence(_t(1e-8, -1e-6, 0.0), _t(0.0, 1e-8, -1e-6), kind).abs().max() < 2e-5
        assert binary_divergence(_t(math.log(0.8)), _t(0.0), kind).item() > THRESHOLDS[kind]


@pytest.mark.parametrize("kind", THRESHOLDS)
def test_loss_and_gradient_of_dppo_are_those_of_the_formula(kind: Divergence) -> None:
    rng = np.random.default_rng(3)
    p, q = rng.uniform(0.001, 0.999, (2, 4000))
    advantages, delta = rng.normal(size=4000), THRESHOLDS[kind]
    divergence = np.abs(p - q) if kind == "binary_tv" else p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    away = ((advantages > 0) & (q > p)) | ((advantages < 0) & (q < p))
    kept = 1.0 - ((divergence > delta) & away)
    assert 0.2 < kept.mean() < 0.8 and (divergence > delta).mean() > kept.mean() - 0.5, "both sides of the bound"
    log_probs = torch.from_numpy(np.log(q)).requires_grad_()
    old = torch.from_numpy(np.log(p))
    one = torch.ones(4000, dtype=torch.float64)
    got = dppo_loss(log_probs, old, torch.from_numpy(advantages), one, divergence_type=kind, threshold=delta)
    assert got.loss.detach().numpy() == pytest.approx(-kept * q / p * advantages, rel=1e-12)
    (slope,) = torch.autograd.grad(got.loss.sum(), log_probs)
    plain = torch.from_numpy(np.log(q)).requires_grad_()
    (want,) = torch.autograd.grad(-(torch.from_numpy(kept * advantages) * (plain - old).exp()).sum(), plain)
    torch.testing.assert_close(slope, want, rtol=1e-12, atol=0.0)


def test_maxrl_divides_by_the_rate_of_success() -> None:
    rewards, groups = np.array([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]), np.repeat([5, 2], 4)
    got = success_advantages(rewards, groups, np.arange(8))
    assert got.tolist() == pytest.approx([3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1], rel=1e-15)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_group_with_no_failure_or_no_success_has_no_advantage(value: float) -> None:
    assert success_advantages([value] * 4, [0] * 4, range(4)).tolist() == [0.0] * 4


def test_maxrl_counts_siblings_once_and_leaves_out_the_unscored() -> None:
    rewards, groups, executions = [1.0, 1.0, 0.0, float("nan"), 1.0], [0, 0, 0, 0, 1], [0, 0, 1, 2, 3]
    assert success_advantages(rewards, groups, executions).tolist() == [1.0, 1.0, -1.0, 0.0, 0.0]


def test_maxrl_refuses_rewards_that_are_no_rate_of_success() -> None:
    with pytest.raises(DataError, match="a reward is -1"):
        success_advantages([1.0, -1.0], [0, 0], [0, 1])


@pytest.mark.parametrize("num", [2, 3, 5])
@pytest.mark.parametrize("logit", [-2.0, 0.3])
def test_the_expected_gradient_of_maxrl_is_that_of_the_series_of_log_p(num: int, logit: float) -> None:
    """Law: over all outcomes of a group of G, it is the gradient of -sum_{k=1}^{G-1} (1 - p)^k / k."""
    p = 1.0 / (1.0 + math.exp(-logit))
    expected = 0.0
    for outcome in itertools.product((0.0, 1.0), repeat=num):
        rewards = np.array(outcome)
        scores = rewards - p  # d log P(outcome) / d logit of each execution
        advantages = success_advantages(rewards, [0] * num, range(num))
        chance = p ** rewards.sum() * (1 - p) ** (num - rewards.sum())
        expected += chance * float(advantages @ scores) / num
    variable = _t(logit).requires_grad_()
    series = -sum(((1 - variable.sigmoid()) ** k / k for k in range(1, num)), start=_t(0.0))
    (want,) = torch.autograd.grad(series.sum(), variable)
    assert expected == pytest.approx(want.item(), rel=1e-12)
