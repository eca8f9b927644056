"""Losses: the formulas of the papers, and law 5, what is masked cannot matter."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from slime.algorithms.aggregation import token_weights
from slime.algorithms.kl import KL_TYPES, kl_estimate
from slime.algorithms.log_ratio import LOG_RATIO_LIMIT, clamped_log_ratio
from slime.algorithms.off_policy import truncated_weights
from slime.algorithms.policy_loss import clipped_policy_loss
from slime.algorithms.sft_loss import negative_log_likelihood
from slime.core.errors import ConfigError

POISONS = [float("nan"), float("inf"), -float("inf"), 1e6]


def _ratio(value: float) -> torch.Tensor:
    return torch.tensor([math.log(value)])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, 0.0),
        (1.1, 2.0, -2.2, 0.0),
        (1.5, 2.0, -2.56, 1.0),  # clip-higher at 1.28
        (0.5, 2.0, -1.0, 0.0),
        (0.5, -2.0, 1.6, 1.0),  # clipped at 0.8
        (1.5, -2.0, 3.0, 0.0),
        (9.0, -2.0, 6.0, 1.0),  # dual clip at 3
    ],
)
def test_clipping(ratio: float, advantage: float, loss: float, clipped: float) -> None:
    got = clipped_policy_loss(
        _ratio(ratio),
        torch.zeros(1),
        torch.tensor([advantage]),
        torch.ones(1),
        eps_clip=0.2,
        eps_clip_high=0.28,
        eps_clip_c=3.0,
    )
    assert got.loss.item() == pytest.approx(loss, rel=1e-5)
    assert got.clipped.item() == clipped
    assert got.old_minus_new.item() == pytest.approx(-math.log(ratio), abs=1e-6)


def test_gradient_on_policy_is_the_policy_gradient() -> None:
    log_probs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5])
    result = clipped_policy_loss(log_probs, log_probs.detach(), advantages, torch.ones(3), eps_clip=0.2)
    result.loss.sum().backward()
    assert log_probs.grad is not None
    assert torch.equal(log_probs.grad, -advantages)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("kind", KL_TYPES)
def test_masked_values_change_no_bit(poison: float, kind: str) -> None:
    mask = torch.tensor([1.0, 0.0, 1.0])

    def run(value: float) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = torch.tensor([-1.0, value, -2.0], requires_grad=True)
        old, ref = torch.tensor([-1.1, value, -1.7]), torch.tensor([-0.9, value, -2.2])
        policy = clipped_policy_loss(
            log_probs, old, torch.tensor([1.0, value, -1.0]), mask, eps_clip=0.2, eps_clip_c=3.0
        )
        weights = truncated_weights(old, ref, mask, clip=2.0, clip_low=0.0)
        loss = policy.loss * weights.weight + kl_estimate(log_probs, ref, mask, kind)
        loss = loss + negative_log_likelihood(log_probs, mask)
        loss.sum().backward()
        assert log_probs.grad is not None
        return loss.detach(), log_probs.grad

    want_loss, want_grad = run(-1.5)
    loss, grad = run(poison)
    assert torch.equal(loss, want_loss)
    assert torch.equal(grad, want_grad)


def test_kl_estimators() -> None:
    d = torch.tensor([0.3, -0.7])
    zero, one = torch.zeros(2), torch.ones(2)
    assert torch.allclose(kl_estimate(d, zero, one, "k1"), d)
    assert torch.allclose(kl_estimate(d, zero, one, "k2"), d**2 / 2)
    assert torch.allclose(kl_estimate(d, zero, one, "k3"), torch.exp(-d) - 1 + d)
    assert kl_estimate(torch.tensor([-9.0]), zero[:1], one[:1], "low_var_kl").item() == 10.0
    with pytest.raises(ConfigError, match="k4"):
        kl_estimate(d, zero, one, "k4")


def test_kl_estimators_are_unbiased_where_the_paper_says_so() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    exact = (p * (p / q).log()).sum()
    for kind in ("k1", "k3"):
        mean = (p * kl_estimate(p.log(), q.log(), torch.ones(3), kind)).sum()
        assert mean.item() == pytest.approx(exact.item(), rel=1e-5)


def test_log_ratio_is_clamped_and_counted() -> None:
    ratio, limited = clamped_log_ratio(torch.tensor([0.0, 50.0]), torch.tensor([-1.0, 0.0]), torch.ones(2))
    assert ratio.tolist() == [1.0, LOG_RATIO_LIMIT]
    assert limited.tolist() == [False, True]


def test_truncated_weights() -> None:
    ratios = torch.tensor([0.1, 1.0, 5.0])
    got = truncated_weights(ratios.log(), torch.zeros(3), torch.ones(3), clip=2.0, clip_low=0.5)
    assert got.weight.tolist() == pytest.approx([0.5, 1.0, 2.0])
    assert got.truncated.tolist() == [1.0, 0.0, 1.0]


def _masks(lengths: list[int]) -> list[np.ndarray]:
    return [np.ones(n, np.float32) for n in lengths]


def test_default_aggregation_is_the_mean_over_executions() -> None:
    weights = token_weights(_masks([2, 10]), [0, 1], per_token=False)
    assert [float(w.sum()) for w in weights] == pytest.approx([0.5, 0.5])


def test_siblings_share_one_execution() -> None:
    weights = token_weights(_masks([2, 6, 4]), [0, 0, 1], per_token=False)
    assert [float(w.sum()) for w in weights] == pytest.approx([0.125, 0.375, 0.5])


def test_an_execution_without_trained_tokens_stays_in_the_denominator() -> None:
    masks = [np.zeros(3, np.float32), np.ones(4, np.float32)]
    weights = token_weights(masks, [0, 1], per_token=False)
    assert float(weights[0].sum()) == 0.0
    assert float(weights[1].sum()) == pytest.approx(0.5)
    assert all(np.isfinite(w).all() for w in token_weights(masks[:1], [0], per_token=False))


def test_per_token_aggregation() -> None:
    weights = token_weights(_masks([2, 6]), [0, 1], per_token=True)
    assert np.concatenate(weights).tolist() == pytest.approx([0.125] * 8)
