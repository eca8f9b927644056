"""Law 5: what stands at masked positions of any input changes no bit of a result or a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from slime.algorithms.advantages.ppo import generalized_advantages
from slime.algorithms.advantages.reinforce import discounted_returns
from slime.algorithms.advantages.returns import distilled, spread_advantage, token_rewards, whiten
from slime.algorithms.off_policy.masks import opsm_mask, rejection_mask
from slime.algorithms.off_policy.tis import Mode, importance_weights
from slime.algorithms.policy_loss import TokenLosses
from slime.algorithms.policy_loss.cispo import cispo_loss
from slime.algorithms.policy_loss.dppo import dppo_loss
from slime.algorithms.policy_loss.ppo_clip import clipped_policy_loss, gspo_loss
from slime.algorithms.policy_loss.sapo import sapo_loss
from slime.algorithms.token_losses import Sequences, negative_log_likelihood, value_loss
from slime.settings.groups.algorithm import Level
from tests.support.algorithms import KL_TYPES, kl_estimate

POISONS = [float("nan"), float("inf"), -float("inf"), 1e6, -1e6]
IDS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3])
MASK = np.array([1, 0, 1, 1, 1, 0, 0, 1.0])
"""Sequence 2 is fully masked."""
SEQUENCES = Sequences(IDS, 4)

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""log_probs (with gradient), two other log-probs or values, advantages."""


def _parts(result: TokenLosses) -> list[Tensor]:
    return [result.loss, result.clipped, result.old_minus_new, result.ratio_limited]


def _weights(x: Inputs, level: str, mode: str) -> list[Tensor]:
    mask = torch.from_numpy(MASK)
    w = importance_weights(x[1], x[2], mask, SEQUENCES, level=level, mode=mode, low=0.9, high=1.3)
    keep = rejection_mask(x[1], x[2], mask, SEQUENCES, level=level, low=0.85, high=1.1, veto=0.7)
    loss = clipped_policy_loss(x[0], x[1], x[3], mask, eps_clip=0.2).loss * (w.weight + keep)
    return [loss, w.weight, w.raw, w.truncated, w.ratio_limited, keep]


M = torch.from_numpy(MASK)
TORCH_CASES: dict[str, Callable[[Inputs], list[Tensor]]] = {
    "clip": lambda x: _parts(clipped_policy_loss(x[0], x[1], x[3], M, eps_clip=0.2, eps_clip_high=0.28)),
    "dual clip": lambda x: _parts(clipped_policy_loss(x[0], x[1], x[3], M, eps_clip=0.2, eps_clip_c=3.0)),
    "no limit": lambda x: _parts(clipped_policy_loss(x[0], x[1], x[3], M, eps_clip=0.2, log_ratio_limit=0.0)),
    "gspo": lambda x: _parts(gspo_loss(x[0], x[1], x[3], M, sequences=SEQUENCES, eps_clip=0.02, eps_clip_c=3.0)),
    "cispo": lambda x: _parts(cispo_loss(x[0], x[1], x[3], M, clip_low=0.8, clip_high=1.28)),
    "cispo, no floor": lambda x: _parts(cispo_loss(x[0], x[1], x[3], M, clip_low=None, clip_high=1.28)),
    "sapo": lambda x: _parts(sapo_loss(x[0], x[1], x[3], M)),
    "dppo": lambda x: _parts(dppo_loss(x[0], x[1], x[3], M, threshold=0.02)),
    "dppo, kl": lambda x: _parts(dppo_loss(x[0], x[1], x[3], M, divergence_type="binary_kl", threshold=0.01)),
    "sft": lambda x: [negative_log_likelihood(x[0], M)],
    "value": lambda x: list(value_loss(x[0], x[1], x[2], M, value_clip=0.2)),
    "opsm": lambda x: [
        clipped_policy_loss(x[0], x[1], x[3], M, eps_clip=0.2).loss
        * opsm_mask(x[0], x[1], x[3], M, SEQUENCES, delta=0.05)
    ],
    **{f"kl {k}": lambda x, k=k: [kl_estimate(x[0], x[2], M, k)] for k in KL_TYPES},
    **{f"kl {k}, ratio": lambda x, k=k: [kl_estimate(x[0], x[2], M, k, old_log_probs=x[1])] for k in KL_TYPES},
    **{f"weights {k} {m}": lambda x, k=k, m=m: _weights(x, k, m) for k in get_args(Level) for m in get_args(Mode)},
}


def _inputs(at_masked: float, dtype: torch.dtype) -> Inputs:
    base = np.random.default_rng(5).normal(-1.0, 0.12, (4, len(MASK)))
    base[3] += 1.0
    values = [torch.from_numpy(np.where(MASK > 0, row, at_masked)).to(dtype) for row in base]
    return values[0].requires_grad_(), values[1], values[2], values[3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", TORCH_CASES)
def test_masked_values_change_no_bit(name: str, dtype: torch.dtype) -> None:
    def run(at_masked: float) -> list[Tensor]:
        inputs = _inputs(at_masked, dtype)
        results = TORCH_CASES[name](inputs)
        results[0].sum().backward()
        assert inputs[0].grad is not None
        return [*(r.detach() for r in results), inputs[0].grad]

    want = run(-1.5)
    assert all(r.dtype == dtype and bool(r.isfinite().all()) for r in want)
    assert want[0].abs().sum() > 0, "the case must have a loss"
    assert bool((want[0][M == 0] == 0).all() & (want[-1][M == 0] == 0).all())
    for poison in POISONS:
        assert all(torch.equal(a, b) for a, b in zip(run(poison), want, strict=True)), poison


HOST_CASES: dict[str, Callable[[np.ndarray, np.ndarray], list[np.ndarray]]] = {
    "token rewards": lambda x, y: [token_rewards(0.5, MASK, x, 0.1)],
    "spread advantage": lambda x, y: [spread_advantage(0.5, MASK, x, 0.1)],
    "gae": lambda x, y: list(generalized_advantages(x, y, MASK, 0.9, 0.95)),
    **{f"returns {o}": lambda x, y, o=o: [discounted_returns(x, MASK, 0.9, o)] for o in ("skip", "through", "reset")},
    "distilled": lambda x, y: [distilled(x, y, x + 1, MASK, 0.5)],
    "whiten": lambda x, y: whiten([x, y], [MASK, MASK]),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", HOST_CASES)
def test_masked_values_change_no_bit_on_the_host(name: str) -> None:
    def run(at_masked: float) -> list[np.ndarray]:
        rng = np.random.default_rng(6)
        return HOST_CASES[name](*(np.where(MASK > 0, rng.normal(size=len(MASK)), at_masked) for _ in range(2)))

    want = run(0.3)
    assert all(np.isfinite(w).all() for w in want)
    for poison in POISONS:
        assert all(np.array_equal(a, b) for a, b in zip(run(poison), want, strict=True)), poison
