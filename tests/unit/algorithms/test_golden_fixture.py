"""The golden fixture: four short sequences whose advantages, losses and gradients are known to six decimals.

Each figure is checked twice: against the printed one (`PRINTED`, 1e-6), and against the formula of the source written
again here in plain NumPy (1e-12), which shares no code with the package.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from slime.algorithms.advantages.grpo import group_advantages, leave_one_out
from slime.algorithms.advantages.ppo import generalized_advantages
from slime.algorithms.advantages.reinforce import discounted_returns
from slime.algorithms.advantages.returns import distilled, token_rewards, whiten
from slime.algorithms.off_policy.masks import opsm_mask, rejection_mask
from slime.algorithms.off_policy.tis import importance_weights, mismatch_log_ratio
from slime.algorithms.policy_loss.cispo import cispo_loss
from slime.algorithms.policy_loss.ppo_clip import clipped_policy_loss, gspo_loss
from slime.algorithms.token_losses import Sequences
from tests.support.algorithms import kl_estimate, token_weights

REWARDS = np.array([1.0, 0.0, 0.5, 0.0])
LENGTHS = [3, 2, 4, 1]
IDS = np.repeat(np.arange(4), LENGTHS)
MASK = np.array([1, 1, 1, 1, 1, 1, 1, 0, 1, 1.0])
OLD = np.array([-0.5, -1.0, -0.2, -2.0, -0.1, -0.7, -0.3, -9.9, -1.2, -0.9])
NEW = OLD + np.array([0.1, -0.2, 0.15, -0.4, 0.05, 0.25, 0.0, 3.3, -0.15, 0.5])
ROLLOUT = OLD - np.array([0.02, -0.05, 0.01, 0.9, 0.0, -0.1, 0.03, 7.7, 0.0, -0.02])
REF = NEW - np.array([0.3, -0.1, 0.0, 0.2, -0.2, 0.05, 0.4, 1.1, -0.3, 0.6])
TEACHER = np.array([-0.3, -1.5, -0.2, -1.0, -0.3, -0.5, -0.5, -2.0, -1.0, -0.6])
LOW, HIGH = 0.2, 0.28

GRPO = (REWARDS - 0.375) / (np.sqrt(((REWARDS - 0.375) ** 2).sum() / 3) + 1e-6)
ADVANTAGE, DR_ADVANTAGE = GRPO[IDS], (REWARDS - 0.375)[IDS]
SEQUENCES = Sequences(torch.from_numpy(IDS), 4)
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "constant_length")

PRINTED = {
    "ppo": (-0.234117, 0.100091, -0.526763, -0.131691),
    "ppo_dr_grpo": (-0.112075, 0.047915, -0.252169, -0.063042),
    "gspo": (-0.242863, 0.087905, -0.546442, -0.136611),
    "cispo": (0.085041, -0.057290, 0.191342, 0.047836),
    "tis": (-0.163817, 0.174665, -0.368589, -0.092147),
    "mis": (-0.303079, 0.017995, -0.681928, -0.170482),
    "gspo_tis": (-0.167967, 0.167215, -0.377926, -0.094481),
    "sequence_tis": (-0.060802, 0.286239, -0.136805, -0.034201),
    "opsm": (-0.395249, -0.081183, -0.889310, -0.222328),
    "k1": (0.105556, 0.179167, 0.2375, 0.059375),
    "k2": (0.044028, 0.064688, 0.099063, 0.024766),
    "k3": (0.039594, 0.056169, 0.089086, 0.022271),
}
PRINTED_GRADIENTS = {
    "ppo": (-1.442889, -1.068918, -1.516867, 0, 0.823511, 0, -0.261116, 0, -0.224745, 1.291522),
    "cispo": (-1.442889, -1.068918, -1.516867, 0.525094, 0.823511, -0.334228, -0.261116, 0, -0.224745, 1.002685),
    "gspo": (-1.327522, -1.327522, -1.327522, 0.657587, 0.657587, -0.269966, -0.269966, 0, -0.269966, 1.291522),
    "tis": (-1.472037, -1.016786, -1.532112, 0, 0.823511, 0, -0.269068, 0, -0.224745, 1.265948),
    "mis": (-1.472037, -1.016786, -1.532112, 0, 0.823511, 0, -0.269068, 0, -0.224745, 1.265948),
    "gspo_tis": (-1.354339, -1.262778, -1.340864, 1.315174, 0.657587, -0.244276, -0.278188, 0, -0.269966, 1.265948),
    "k2": (0.3, -0.1, 0, 0.2, -0.2, 0.05, 0.4, 0, -0.3, 0.6),
    "k3": (0.259182, -0.105171, 0, 0.181269, -0.221403, 0.048771, 0.329680, 0, -0.349859, 0.451188),
}


def _t(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(values, np.float64))


def _ppo(new: Tensor, advantage: np.ndarray = ADVANTAGE) -> Tensor:
    return clipped_policy_loss(new, _t(OLD), _t(advantage), _t(MASK), eps_clip=LOW, eps_clip_high=HIGH).loss


def _gspo(new: Tensor) -> Tensor:
    return gspo_loss(new, _t(OLD), _t(ADVANTAGE), _t(MASK), sequences=SEQUENCES, eps_clip=LOW, eps_clip_high=HIGH).loss


def _cispo(new: Tensor) -> Tensor:
    return cispo_loss(new, _t(OLD), _t(ADVANTAGE), _t(MASK), clip_low=None, clip_high=1.28).loss


def _weight(level: str, mode: str, low: float) -> Tensor:
    return importance_weights(
        _t(OLD), _t(ROLLOUT), _t(MASK), SEQUENCES, level=level, mode=mode, low=low, high=2.0
    ).weight


def _kl(new: Tensor, kind: str) -> Tensor:
    return kl_estimate(new, _t(REF), _t(MASK), kind)


OURS: dict[str, Callable[[Tensor], Tensor]] = {
    "ppo": _ppo,
    "ppo_dr_grpo": lambda new: _ppo(new, DR_ADVANTAGE),
    "gspo": _gspo,
    "cispo": _cispo,
    "tis": lambda new: _ppo(new) * _weight("token", "truncate", 0.0),
    "mis": lambda new: _ppo(new) * _weight("token", "mask", 0.5),
    "gspo_tis": lambda new: _gspo(new) * _weight("token", "truncate", 0.0),
    "sequence_tis": lambda new: _ppo(new) * _weight("sequence", "truncate", 0.0),
    "opsm": lambda new: _ppo(new) * opsm_mask(new, _t(OLD), _t(ADVANTAGE), _t(MASK), SEQUENCES, delta=0.1),
    "k1": lambda new: _kl(new, "k1"),
    "k2": lambda new: _kl(new, "k2"),
    "k3": lambda new: _kl(new, "k3"),
}


def _mean(values: np.ndarray) -> np.ndarray:
    """Mean over each sequence's unmasked tokens, at each token."""
    return np.array([(values * MASK)[i == IDS].sum() / MASK[i == IDS].sum() for i in IDS])


def _np_clip(ratio: np.ndarray, advantage: np.ndarray = ADVANTAGE) -> np.ndarray:
    return -np.minimum(ratio * advantage, np.clip(ratio, 1 - LOW, 1 + HIGH) * advantage)


def _np_losses(new: np.ndarray) -> dict[str, np.ndarray]:
    """Per-token losses [R] by the formulas of the sources; only unmasked tokens mean something."""
    ratio, w, x = np.exp(new - OLD), np.exp(OLD - ROLLOUT), new - REF
    ppo = _np_clip(ratio)
    product = np.exp([((OLD - ROLLOUT) * MASK)[i == IDS].sum() for i in IDS])
    return {
        "ppo": ppo,
        "ppo_dr_grpo": _np_clip(ratio, DR_ADVANTAGE),
        "gspo": _np_clip(np.exp(_mean(new - OLD))),
        "cispo": -np.minimum(ratio, 1.28) * ADVANTAGE * new,
        "tis": ppo * np.minimum(w, 2.0),
        "mis": ppo * np.where((w >= 0.5) & (w <= 2.0), w, 0.0),
        "gspo_tis": _np_clip(np.exp(_mean(new - OLD))) * np.minimum(w, 2.0),
        "sequence_tis": ppo * np.minimum(product, 2.0),
        "opsm": ppo * ~((ADVANTAGE < 0) & (_mean(OLD - new) > 0.1)),
        "k1": x,
        "k2": x**2 / 2,
        "k3": np.exp(-x) - 1 + x,
    }


def _np_aggregate(values: np.ndarray, kind: str) -> float:
    values = values * MASK
    sums = np.array([values[i == IDS].sum() for i in range(4)])
    if kind == "token_mean":
        return float(values.sum() / MASK.sum())
    if kind == "sequence_mean":
        return float((sums / np.array([3, 2, 3, 1])).mean())
    return float(sums.mean() / (4.0 if kind == "constant_length" else 1.0))


def _weights(kind: str) -> Tensor:
    masks = np.split(MASK, np.cumsum(LENGTHS)[:-1])
    return _t(np.concatenate(token_weights(masks, range(4), kind=kind, constant_length=4)))


@pytest.mark.parametrize("kind", AGGREGATIONS)
@pytest.mark.parametrize("name", PRINTED)
def test_loss(name: str, kind: str) -> None:
    got = float((OURS[name](_t(NEW)) * _weights(kind)).sum())
    assert got == pytest.approx(PRINTED[name][AGGREGATIONS.index(kind)], abs=1e-6)
    assert got == pytest.approx(_np_aggregate(_np_losses(NEW)[name], kind), abs=1e-12)


@pytest.mark.parametrize(("count_masked", "want"), [(True, -0.222790), (False, -0.297053)])
def test_fully_masked_last_sequence(count_masked: bool, want: float) -> None:
    masks = np.split(np.where(IDS < 3, MASK, 0.0), np.cumsum(LENGTHS)[:-1])
    weights = token_weights(masks, range(4), count_masked=count_masked)
    assert float((_ppo(_t(NEW)) * _t(np.concatenate(weights))).sum()) == pytest.approx(want, abs=1e-6)


def _gradient(name: str, kind: str | None) -> np.ndarray:
    new = _t(NEW).requires_grad_()
    loss = OURS[name](new)
    (loss.sum() if kind is None else (loss * _weights(kind)).sum()).backward()
    assert new.grad is not None
    return new.grad.numpy()


@pytest.mark.parametrize("name", PRINTED_GRADIENTS)
def test_gradient_of_each_token(name: str) -> None:
    assert _gradient(name, None) == pytest.approx(np.array(PRINTED_GRADIENTS[name]), abs=1e-6)


@pytest.mark.parametrize("kind", AGGREGATIONS)
@pytest.mark.parametrize("name", PRINTED)
def test_gradient_is_the_finite_difference_of_the_formula(name: str, kind: str) -> None:
    step = 1e-6
    ratio = np.exp(NEW - OLD)

    def value(new: np.ndarray) -> float:
        if name == "cispo":  # the weight is held where it is
            return _np_aggregate(-np.minimum(ratio, 1.28) * ADVANTAGE * new, kind)
        if name == "gspo_tis":  # GSPO-token: s is held where it is, each token's weight is part of its advantage
            token = np.exp(_mean(NEW - OLD) + new - NEW)
            return _np_aggregate(_np_clip(token) * np.minimum(np.exp(OLD - ROLLOUT), 2.0), kind)
        return _np_aggregate(_np_losses(new)[name], kind)

    want = [(value(NEW + step * e) - value(NEW - step * e)) / (2 * step) for e in np.eye(len(NEW))]
    assert _gradient(name, kind) == pytest.approx(np.array(want), abs=1e-8)


def test_advantages() -> None:
    args = (REWARDS, [0] * 4, range(4))
    approx = lambda *values: pytest.approx(np.array(values), abs=1e-6)  # noqa: E731
    assert group_advantages(*args) == approx(1.305580, -0.783348, 0.261116, -0.783348)
    assert group_advantages(*args) == pytest.approx(GRPO, abs=1e-12)
    assert group_advantages(*args, epsilon=1e-4) == approx(1.305310, -0.783186, 0.261062, -0.783186)
    assert group_advantages(*args, scale="none") == approx(0.625, -0.375, 0.125, -0.375)
    assert leave_one_out(*args) == approx(0.833333, -0.5, 0.166667, -0.5)
    assert leave_one_out(*args) == pytest.approx((REWARDS - 0.375) * 4 / 3, abs=1e-12)
    masks = np.split(MASK, np.cumsum(LENGTHS)[:-1])
    parts = whiten(np.split(DR_ADVANTAGE, np.cumsum(LENGTHS)[:-1]), masks)
    whitened = np.array([part[0] for part in parts])
    assert whitened == approx(1.154701, -1.154701, 0.0, -1.154701)
    assert whitened == pytest.approx((REWARDS - 0.5) / np.sqrt(0.1875 + 1e-8), abs=1e-12)
    want = (1.50558, 0.80558, 1.30558, 0.216652, -0.983348, 0.461116, 0.061116, 0.0, 0.461116, -0.483348)
    assert distilled(ADVANTAGE, OLD, TEACHER, MASK, 1.0) == approx(*want)


def test_returns_of_the_sequence_with_an_observation() -> None:
    mask = np.array([1, 1, 0, 1])
    rewards = token_rewards(0.5, mask)
    values = np.array([0.2, 0.4, 5.0, 0.6])
    skip, returns = generalized_advantages(rewards, values, mask, 0.9, 0.95, "skip")
    assert skip == pytest.approx(np.array([0.206598, 0.0545, 0.0, -0.1]), abs=1e-6)
    assert returns == pytest.approx(np.where(mask, skip + values, 0.0), abs=1e-12)
    through, _ = generalized_advantages(rewards, values, mask, 0.9, 0.95, "through")
    assert through == pytest.approx(np.array([0.342626, 0.213598, -4.5455, -0.1]), abs=1e-6)
    for observations, want in {
        "skip": [0.405, 0.45, 0, 0.5],
        "reset": [0, 0, 0.45, 0.5],
        "through": [0.3645, 0.405, 0.45, 0.5],
    }.items():
        assert discounted_returns(rewards, mask, 0.9, observations) == pytest.approx(np.array(want), abs=1e-12)


def _ratios(log_ratio: Tensor, mask: np.ndarray = MASK) -> list[float]:
    return [float(log_ratio[(i == IDS) & (mask > 0)][0].exp()) for i in range(4)]


def test_ratios_of_sequences() -> None:
    args = (_t(OLD), _t(ROLLOUT), _t(MASK), SEQUENCES)
    products = _ratios(mismatch_log_ratio(*args, "sequence", 20.0)[0])
    assert products == pytest.approx([0.980199, 2.459603, 0.932394, 0.980199], abs=1e-6)
    means = _ratios(mismatch_log_ratio(*args, "geometric", 20.0)[0])
    assert means == pytest.approx([0.993356, 1.568312, 0.976937, 0.980199], abs=1e-6)
    gspo = SEQUENCES.mean(_t(NEW - OLD), _t(MASK)).exp()
    assert gspo.tolist() == pytest.approx([1.016806, 0.839457, 1.033895, 1.648721], abs=1e-6)
    moved = SEQUENCES.mean(_t(OLD - NEW), _t(MASK))
    assert moved.tolist() == pytest.approx([-0.016667, 0.175, -0.033333, -0.5], abs=1e-6)


def test_sequence_masking_drops_the_second_sequence_by_products_and_none_by_geometric_means() -> None:
    args = (_t(OLD), _t(ROLLOUT), _t(MASK), SEQUENCES)
    dropped = (IDS == 1).astype(float)
    assert (1 - rejection_mask(*args, level="sequence", low=0.5, high=2.0)).tolist() == dropped.tolist()
    assert rejection_mask(*args, level="geometric", low=0.5, high=2.0).min() == 1.0
    weight = importance_weights(*args, level="sequence", mode="mask", low=0.5, high=2.0).weight
    assert (weight == 0).double().tolist() == dropped.tolist()
    kept = importance_weights(*args, level="geometric", mode="mask", low=0.5, high=2.0)
    assert kept.truncated.sum() == 0


def test_dual_clip_binds_in_the_second_fixture() -> None:
    one = _t(np.array([1.0]))
    for c, want, gradient in ((None, 7.389056, 7.389056), (3.0, 3.0, 0.0)):
        new = _t(np.array([2.0])).requires_grad_()
        got = clipped_policy_loss(new, 0 * one, -one, one, eps_clip=LOW, eps_clip_high=HIGH, eps_clip_c=c)
        got.loss.sum().backward()
        assert got.loss.item() == pytest.approx(want, abs=1e-6)
        assert new.grad is not None and new.grad.item() == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize(("mode", "weight"), [("truncate", 2.0), ("mask", 0.0)])
def test_a_weight_out_of_band_on_an_unclipped_token_tells_the_modes_apart(mode: str, weight: float) -> None:
    one = _t(np.ones(1))
    ratio = np.exp(0.1)
    new = _t(np.array([-0.9])).requires_grad_()
    got = importance_weights(
        -one, -2 * one, one, Sequences(torch.zeros(1, dtype=torch.int64), 1), mode=mode, low=0.5, high=2.0
    )
    assert got.raw.item() == pytest.approx(np.e)
    assert got.truncated.item() == 1.0
    loss = clipped_policy_loss(new, -one, -one, one, eps_clip=LOW, eps_clip_high=HIGH).loss * got.weight
    loss.sum().backward()
    assert loss.item() == pytest.approx(weight * ratio, abs=1e-12)
    assert new.grad is not None and new.grad.item() == pytest.approx(weight * ratio, abs=1e-12)
