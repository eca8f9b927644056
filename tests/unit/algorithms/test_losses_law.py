"""Losses, KL and corrections: the formulas of the papers, at and beyond the bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from slime.algorithms.off_policy.masks import opsm_mask, rejection_mask
from slime.algorithms.off_policy.tis import importance_weights
from slime.algorithms.policy_loss import TokenLosses
from slime.algorithms.policy_loss.cispo import cispo_loss
from slime.algorithms.policy_loss.dppo import dppo_loss
from slime.algorithms.policy_loss.ppo_clip import clipped_policy_loss, gspo_loss
from slime.algorithms.policy_loss.sapo import sapo_loss
from slime.algorithms.token_losses import LOG_RATIO_LIMIT, Sequences, clamped_log_ratio, value_loss
from slime.core.errors import ConfigError
from tests.support.algorithms import KL_TYPES, kl_estimate


def _t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _one_sequence(num: int) -> Sequences:
    return Sequences(torch.zeros(num, dtype=torch.int64), 1)


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
@pytest.mark.parametrize("loss_name", ["clip", "gspo"])
def test_clipping(loss_name: str, ratio: float, advantage: float, loss: float, clipped: float) -> None:
    args = (_t(math.log(ratio)).requires_grad_(), _t(0), _t(advantage), _t(1))
    if loss_name == "clip":
        got = clipped_policy_loss(*args, eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=3.0)
    else:
        got = gspo_loss(*args, sequences=_one_sequence(1), eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=3.0)
    got.loss.sum().backward()
    assert got.loss.item() == pytest.approx(loss, abs=1e-12)
    assert got.clipped.item() == clipped
    assert got.old_minus_new.item() == pytest.approx(-math.log(ratio), abs=1e-12)
    assert args[0].grad is not None
    assert args[0].grad.item() == pytest.approx(0.0 if clipped else -ratio * advantage)


LOSS_NAMES = ("clip", "gspo", "cispo", "sapo", "dppo", "dppo, kl")


def _all_losses(log_probs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> dict[str, TokenLosses]:
    args = (log_probs, old, advantages, torch.ones_like(old))
    return {
        "clip": clipped_policy_loss(*args, eps_clip=0.2, eps_clip_c=3.0),
        "gspo": gspo_loss(*args, sequences=Sequences(torch.arange(len(old)), len(old)), eps_clip=0.2, eps_clip_c=3.0),
        "cispo": cispo_loss(*args, clip_low=0.8, clip_high=1.2),
        "sapo": sapo_loss(*args),
        "dppo": dppo_loss(*args, threshold=0.15),
        "dppo, kl": dppo_loss(*args, divergence_type="binary_kl", threshold=0.05),
    }


def test_gradient_on_policy_is_the_policy_gradient() -> None:
    advantages = _t(1.0, -2.0, 0.5)
    for name in LOSS_NAMES:
        log_probs = _t(-1.0, -2.0, -3.0).requires_grad_()
        _all_losses(log_probs, log_probs.detach(), advantages)[name].loss.sum().backward()
        assert log_probs.grad is not None
        assert log_probs.grad.tolist() == pytest.approx((-advantages).tolist(), abs=1e-12), name


@pytest.mark.parametrize("log_ratio", [-90.0, -30.0, -5.0, 5.0, 30.0, 90.0])
def test_extreme_ratios_stay_finite_and_are_counted(log_ratio: float) -> None:
    for name in LOSS_NAMES:
        for advantage in (1.0, -1.0):
            log_probs = _t(log_ratio).requires_grad_()
            got = _all_losses(log_probs, _t(0.0), _t(advantage))[name]
            got.loss.sum().backward()
            assert log_probs.grad is not None
            assert bool(got.loss.isfinite().all() & log_probs.grad.isfinite().all()), name
            assert got.ratio_limited.item() == float(abs(log_ratio) > LOG_RATIO_LIMIT), name
            if name in ("clip", "gspo") and log_ratio > 0 and advantage < 0:
                assert got.loss.item() == 3.0


def test_without_a_limit_the_ratio_is_what_it_is() -> None:
    args = (_t(30.0, 90.0), _t(0.0, 0.0), _t(-1.0, -1.0), _t(1.0, 1.0))
    got = clipped_policy_loss(*args, eps_clip=0.2, log_ratio_limit=0.0)
    assert got.loss.tolist() == pytest.approx([math.exp(30.0), math.exp(90.0)])
    assert got.ratio_limited.sum() == 0
    assert clipped_policy_loss(*args, eps_clip=0.2).loss.tolist() == pytest.approx([math.exp(20.0)] * 2)
    assert clipped_policy_loss(*args, eps_clip=0.2, log_ratio_limit=2.0).loss.tolist() == pytest.approx([math.e**2] * 2)


def test_gspo_gives_every_token_of_a_sequence_the_same_gradient_or_none() -> None:
    ids = torch.tensor([0, 0, 0, 1, 1])
    log_probs = _t(0.3, -0.2, 0.1, 0.9, -0.1).requires_grad_()
    got = gspo_loss(
        log_probs,
        torch.zeros_like(log_probs),
        torch.ones_like(log_probs),
        torch.ones_like(log_probs),
        sequences=Sequences(ids, 2),
        eps_clip=0.2,
        eps_clip_high=0.28,
    )
    got.loss.sum().backward()
    s = math.exp(0.2 / 3)
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-s, -s, -s, 0.0, 0.0], abs=1e-12)
    assert got.clipped.tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_gspo_gives_every_token_its_own_advantage() -> None:
    """Law: on policy the gradient of a token is -A of its own, not of its sequence (arXiv:2507.18071, section 4.3)."""
    advantages = _t(1.0, -2.0, 1.0, 0.5, 0.0)
    log_probs = _t(0.3, -0.2, 0.1, 0.9, -0.1).requires_grad_()
    sequences = Sequences(torch.tensor([0, 0, 0, 1, 1]), 2)
    one = torch.ones_like(advantages)
    gspo_loss(log_probs, log_probs.detach(), advantages, one, sequences=sequences, eps_clip=0.2).loss.sum().backward()
    assert log_probs.grad is not None and log_probs.grad.tolist() == (-advantages).tolist()


def test_cispo_bounds_the_weight_and_keeps_the_gradient() -> None:
    log_probs = _t(math.log(0.5), 0.0, math.log(3.0)).requires_grad_()
    one = torch.ones(3, dtype=torch.float64)
    got = cispo_loss(log_probs, 0 * one, one, one, clip_low=0.8, clip_high=1.28)
    got.loss.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-0.8, -1.0, -1.28])
    assert got.clipped.tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(("advantage", "tau"), [(1.5, 1.0), (-1.5, 1.05), (0.0, 1.05)])
def test_sapo_gate(advantage: float, tau: float) -> None:
    for ratio in (0.2, 1.0, 1.7, 6.0):
        log_probs = _t(math.log(ratio)).requires_grad_()
        got = sapo_loss(log_probs, _t(0), _t(advantage), _t(1))
        got.loss.sum().backward()
        p = 1 / (1 + math.exp(-tau * (ratio - 1)))
        assert got.loss.item() == pytest.approx(-p * 4 / tau * advantage, abs=1e-12)
        assert log_probs.grad is not None
        assert log_probs.grad.item() == pytest.approx(-4 * p * (1 - p) * ratio * advantage, abs=1e-12)


def test_kl_estimators() -> None:
    d = torch.tensor([0.3, -0.7])
    zero, one = torch.zeros(2), torch.ones(2)
    assert torch.allclose(kl_estimate(d, zero, one, "k1"), d)
    assert torch.allclose(kl_estimate(d, zero, one, "k2"), d**2 / 2)
    assert torch.allclose(kl_estimate(d, zero, one, "k3"), torch.exp(-d) - 1 + d)
    assert kl_estimate(torch.tensor([-9.0]), zero[:1], one[:1], "low_var_kl").item() == 10.0
    with pytest.raises(ConfigError, match="k4"):
        kl_estimate(d, zero, one, "k4")


P, OLD, Q = _t(0.5, 0.3, 0.2), _t(0.3, 0.4, 0.3), _t(0.2, 0.3, 0.5)


def test_kl_estimators_are_unbiased_where_the_paper_says_so() -> None:
    exact = (P * (P / Q).log()).sum().item()
    for kind in ("k1", "k3"):
        mean = (P * kl_estimate(P.log(), Q.log(), torch.ones(3), kind)).sum()
        assert mean.item() == pytest.approx(exact, rel=1e-12)


FAR = _t(0.02, 0.5, 0.48), _t(0.5, 0.3, 0.2), _t(0.6, 0.2, 0.2)
"""The same three, where the k3 of the first token is 25, and 1 with its ratio."""


@pytest.mark.parametrize("kind", ["k1", "k3", "low_var_kl"])
@pytest.mark.parametrize(("new", "old", "ref"), [(P, OLD, Q), FAR], ids=["near", "far"])
def test_with_the_ratio_value_and_gradient_are_those_of_the_exact_kl_under_old_samples(
    new: torch.Tensor, old: torch.Tensor, ref: torch.Tensor, kind: str
) -> None:
    logits = new.log().clone().requires_grad_()
    log_p = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((log_p.exp() * (log_p - ref.log())).sum(), logits)
    log_p = logits.log_softmax(0)
    mean = (old * kl_estimate(log_p, ref.log(), torch.ones(3), kind, old_log_probs=old.log())).sum()
    (got,) = torch.autograd.grad(mean, logits)
    assert mean.item() == pytest.approx((new * (new / ref).log()).sum().item(), rel=1e-12)
    assert got.tolist() == pytest.approx(exact.tolist(), abs=1e-12)


PLAIN_KL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: torch.exp(-d) - 1 + d,
    "low_var_kl": lambda d: torch.exp(-d) - 1 + d,
}


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("kind", KL_TYPES)
def test_no_bound_turns_or_swells_the_gradient_of_a_kl(kind: str, unbiased: bool) -> None:
    """Law: value and gradient are those of the formula without bounds, and where a bound acts there is no gradient."""
    grid = torch.linspace(-24.0, 24.0, 97, dtype=torch.float64)  # 0.5 apart, beyond the limit of 20 on both sides
    d, log_ratio = (x.flatten() for x in torch.meshgrid(grid, grid if unbiased else grid[:1] * 0, indexing="ij"))

    def gradient(value: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = torch.zeros_like(d).requires_grad_()
        values = value(log_probs)
        values.sum().backward()
        assert log_probs.grad is not None
        return values.detach(), log_probs.grad

    want, slope = gradient(lambda lp: PLAIN_KL[kind](lp + d) * ((lp + log_ratio).exp() if unbiased else 1.0))
    old = -log_ratio if unbiased else None
    got, found = gradient(lambda lp: kl_estimate(lp, -d, torch.ones_like(d), kind, old_log_probs=old))
    bounded = (d.abs() > LOG_RATIO_LIMIT) | (log_ratio.abs() > LOG_RATIO_LIMIT)
    assert bounded.any()
    if kind == "low_var_kl":
        assert float(got.max()) == 10.0, "no token outweighs all others"
        bounded = bounded | (want > 10.0)
    assert not found[bounded].any()
    torch.testing.assert_close(got[~bounded], want[~bounded], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[~bounded], slope[~bounded], rtol=1e-9, atol=1e-9)
    if unbiased and kind in ("k3", "low_var_kl"):
        torch.testing.assert_close(slope, (d * log_ratio.exp()), rtol=1e-9, atol=1e-6 * float(slope.abs().max()))


@pytest.mark.parametrize("kind", KL_TYPES)
def test_a_kl_with_its_ratio_is_exact_in_float32(kind: str) -> None:
    """Law: the two parts of a slope that cancel (e^15, of which 15 is left) leave no rounding of the larger one."""
    d = torch.linspace(-19.75, 19.75, 80)
    log_probs = torch.zeros_like(d).requires_grad_()
    old = torch.full_like(d, 0.25)
    values = kl_estimate(log_probs, -d, torch.ones_like(d), kind, old_log_probs=old)
    values.sum().backward()
    exact = torch.zeros(len(d), dtype=torch.float64).requires_grad_()
    want = PLAIN_KL[kind](exact + d.double()) * (exact - 0.25).exp()
    want.sum().backward()
    assert values.dtype == torch.float32 and log_probs.grad is not None and exact.grad is not None
    inside = want < 10.0 if kind == "low_var_kl" else torch.ones_like(want, dtype=torch.bool)
    torch.testing.assert_close(log_probs.grad, torch.where(inside, exact.grad, 0.0).float(), rtol=1e-5, atol=1e-6)


def test_log_ratio_is_clamped_and_counted() -> None:
    ratio, limited = clamped_log_ratio(torch.tensor([0.0, 50.0]), torch.tensor([-1.0, 0.0]), torch.ones(2))
    assert ratio.tolist() == [1.0, LOG_RATIO_LIMIT]
    assert limited.tolist() == [False, True]


@pytest.mark.parametrize(("mode", "want"), [("truncate", [0.5, 1.0, 2.0]), ("mask", [0.0, 1.0, 0.0])])
def test_token_weights_within_bounds(mode: str, want: list[float]) -> None:
    ratios = _t(0.1, 1.0, 5.0)
    got = importance_weights(ratios.log(), 0 * ratios, torch.ones(3), _one_sequence(3), mode=mode, low=0.5, high=2.0)
    assert got.weight.tolist() == pytest.approx(want)
    assert got.raw.tolist() == pytest.approx(ratios.tolist())
    assert got.truncated.tolist() == [1.0, 0.0, 1.0]


def test_levels_take_unmasked_tokens_alone() -> None:
    ids, mask = torch.tensor([0, 0, 0, 1]), _t(1, 0, 1, 1)
    old = _t(2.0, 77.0, 3.0, 0.5).log()
    for level, want in (("sequence", [6.0, 1.0, 6.0, 0.5]), ("geometric", [6**0.5, 1.0, 6**0.5, 0.5])):
        got = importance_weights(old, 0 * old, mask, Sequences(ids, 2), level=level, low=0.0, high=10.0)
        assert got.weight.tolist() == pytest.approx(want)


def test_a_product_that_leaves_the_limit_is_clamped_and_counted() -> None:
    old = torch.full((3,), 9.0, dtype=torch.float64)
    got = importance_weights(
        old, 0 * old, torch.ones(3), _one_sequence(3), level="sequence", low=0.0, high=float("inf")
    )
    assert got.raw.tolist() == pytest.approx([math.exp(20.0)] * 3)
    assert got.ratio_limited.tolist() == [1.0] * 3


def test_bounds_belong_to_the_band() -> None:
    args = (_t(-1.0), _t(-1.0), _t(1), _one_sequence(1))
    assert importance_weights(*args, mode="mask", low=1.0, high=1.0).truncated.item() == 0.0
    assert rejection_mask(*args, low=1.0, high=1.0, veto=1.0).item() == 1.0


def test_rejection_and_veto() -> None:
    ids, mask = torch.tensor([0, 0, 1, 1, 1]), _t(1, 1, 1, 0, 1)
    old, zero = _t(0.4, 1.0, 3.0, 0.001, 1.0).log(), torch.zeros(5, dtype=torch.float64)
    args = (old, zero, mask, Sequences(ids, 2))
    assert rejection_mask(*args).tolist() == [1.0] * 5
    assert rejection_mask(*args, low=0.5).tolist() == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert rejection_mask(*args, high=2.0).tolist() == [1.0, 1.0, 0.0, 1.0, 1.0]
    assert rejection_mask(*args, level="sequence", low=0.5, high=2.0).tolist() == [0.0, 0.0, 0.0, 1.0, 0.0]
    assert rejection_mask(*args, level="geometric", low=0.5, high=2.0).tolist() == [1.0] * 5
    for level in ("token", "sequence", "geometric"):  # a token's own ratio, whatever is compared with the band
        assert rejection_mask(*args, level=level, veto=0.5).tolist() == [0.0, 0.0, 1.0, 1.0, 1.0]


def test_sequences_that_the_policy_left_are_masked_only_when_bad() -> None:
    ids, one = torch.tensor([0, 0, 1, 1, 2]), torch.ones(5, dtype=torch.float64)
    new, old, advantages = _t(-1, -1, -1, -1, -1), _t(-0.5, -0.9, -0.5, -0.9, -0.9), _t(-1, -1, 1, 1, -1)
    keep = opsm_mask(new, old, advantages, one, Sequences(ids, 3), delta=0.2)
    assert keep.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert opsm_mask(new, old, 0 * one, one, Sequences(ids, 3), delta=0.2).tolist() == [1.0] * 5


def test_a_value_within_the_clip_is_not_counted_as_clipped() -> None:
    """Law: what rounding makes of old + (value - old) is no clip."""
    generator = torch.Generator().manual_seed(0)
    values, old, target = (torch.randn(1000, generator=generator) for _ in range(3))
    rounded = ((old + (values - old) - target).square() > (values - target).square()).float().mean()
    assert rounded > 0.05, "rounding that never differs proves nothing"
    assert value_loss(values, old, target, torch.ones(1000), value_clip=10.0)[1].sum() == 0.0


def test_value_loss_is_the_larger_error() -> None:
    values = _t(1.0, 2.0, 0.0).requires_grad_()
    loss, clipped = value_loss(values, _t(1.0, 0.0, 0.0), _t(0.0, 0.0, 1.0), torch.ones(3), value_clip=0.5)
    assert loss.tolist() == [1.0, 4.0, 1.0]
    assert clipped.tolist() == [0.0, 0.0, 0.0]
    loss, clipped = value_loss(values, _t(0.0, 0.0, 0.0), _t(0.5, 2.0, 0.0), torch.ones(3), value_clip=0.5)
    assert loss.tolist() == [0.25, 2.25, 0.0]
    assert clipped.tolist() == [0.0, 1.0, 0.0]
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 0.0, 0.0]


def test_unknown_choices_are_refused() -> None:
    args = (_t(0), _t(0), _t(1), _one_sequence(1))
    with pytest.raises(AssertionError, match="word"):
        importance_weights(*args, level=cast(Any, "word"), low=0.0, high=1.0)
    with pytest.raises(AssertionError, match="drop"):
        importance_weights(*args, mode=cast(Any, "drop"), low=0.0, high=1.0)
