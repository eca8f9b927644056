"""Every estimator and policy loss finds the optimum of a small problem: regret of at most 1% after a fixed number of
steps, from 20 starting points.

A policy writes three letters of four kinds from a table of logits per prefix; the reward is 0.5 for the right first
letter and 0.5 for a third that repeats the second. Each turn samples 64 sequences in groups of 8, then makes two
updates from them, so the second is off-policy and ratios matter. Regret is exact: 1 minus the expected reward over all
64 sequences. The starting points are trained side by side: their tables share no parameter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from slime.algorithms.advantages.grpo import group_advantages, leave_one_out, success_advantages
from slime.algorithms.advantages.returns import whiten
from slime.algorithms.policy_loss.cispo import cispo_loss
from slime.algorithms.policy_loss.dppo import dppo_loss
from slime.algorithms.policy_loss.ppo_clip import clipped_policy_loss, gspo_loss
from slime.algorithms.policy_loss.sapo import sapo_loss
from slime.algorithms.token_losses import Sequences
from tests.support.algorithms import token_weights
from tests.support.marks import quick

NUM_STARTS, NUM_SAMPLES, GROUP, NUM_TURNS = 20, 64, 8, 100
LONGER = {"maxrl": 150}
"""Without a division by the standard deviation, steps shrink near the optimum; here, rewards have three values."""
LETTERS = np.array(list(itertools.product(range(4), repeat=3)))
PREFIX = np.stack([0 * LETTERS[:, 0], 1 + LETTERS[:, 0], 5 + 4 * LETTERS[:, 0] + LETTERS[:, 1]], 1)
REWARD = 0.5 * (LETTERS[:, 0] == 2) + 0.5 * (LETTERS[:, 2] == LETTERS[:, 1])
TOTAL = NUM_STARTS * NUM_SAMPLES
GROUPS = np.arange(TOTAL) // GROUP
SEQUENCES = Sequences(torch.arange(TOTAL).repeat_interleave(3), TOTAL)
MASK = torch.ones(TOTAL * 3, dtype=torch.float64)
START = torch.arange(NUM_STARTS).repeat_interleave(NUM_SAMPLES)

Array = npt.NDArray[np.float64]
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "ppo_clip": lambda lp, old, a: clipped_policy_loss(lp, old, a, MASK, eps_clip=0.2, eps_clip_high=0.28).loss,
    "gspo": lambda lp, old, a: gspo_loss(lp, old, a, MASK, sequences=SEQUENCES, eps_clip=0.1).loss,
    "cispo": lambda lp, old, a: cispo_loss(lp, old, a, MASK, clip_low=0.8, clip_high=1.28).loss,
    "sapo": lambda lp, old, a: sapo_loss(lp, old, a, MASK).loss,
    "dppo": lambda lp, old, a: dppo_loss(lp, old, a, MASK, threshold=0.15).loss,
}


def advantages_of(estimator: str, rewards: Array) -> Array:
    """[TOTAL, 3]"""
    executions = np.arange(TOTAL).tolist()
    if estimator == "rloo":
        values = leave_one_out(rewards, GROUPS.tolist(), executions)
    elif estimator == "maxrl":
        values = success_advantages(rewards, GROUPS.tolist(), executions)
    else:
        scale = "group" if estimator == "grpo" else "none"
        values = group_advantages(rewards, GROUPS.tolist(), executions, scale=scale)
    spread = np.repeat(values[:, None], 3, 1)
    if estimator == "reinforce_plus_plus_baseline":
        spread = np.stack(whiten(list(spread), [np.ones(3)] * TOTAL))
    return spread


def all_log_probs(logits: Tensor) -> Tensor:
    """[NUM_STARTS, 64, 3] of each token of each sequence."""
    return logits.log_softmax(-1)[:, torch.from_numpy(PREFIX), torch.from_numpy(LETTERS)]


def expected_reward(logits: Tensor) -> Array:
    """[NUM_STARTS] exact."""
    return np.asarray(all_log_probs(logits).sum(-1).exp() @ torch.from_numpy(REWARD))


@pytest.mark.parametrize(
    ("estimator", "loss"),
    quick(
        [
            ("grpo", "ppo_clip"),
            ("dr_grpo", "ppo_clip"),
            ("rloo", "ppo_clip"),
            ("reinforce_plus_plus_baseline", "ppo_clip"),
            ("grpo", "gspo"),
            ("grpo", "cispo"),
            ("grpo", "sapo"),
            ("grpo", "dppo"),
            ("maxrl", "ppo_clip"),
        ],
        ("grpo", "gspo"),
    ),
)
def test_the_optimum_is_found(estimator: str, loss: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(NUM_STARTS, 21, 4, generator=generator, dtype=torch.float64).mul_(0.5).requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.05)
    masks, executions = [np.ones(3, np.float32)] * TOTAL, np.arange(TOTAL).tolist()
    weights = torch.from_numpy(np.concatenate(token_weights(masks, executions, kind="sequence_mean"))) * NUM_STARTS
    assert (expected_reward(logits.detach()) < 0.6).all(), "nothing is known at the start"
    for _ in range(LONGER.get(estimator, NUM_TURNS)):
        with torch.no_grad():
            table = all_log_probs(logits)
            rows = table.sum(-1).exp().multinomial(NUM_SAMPLES, replacement=True, generator=generator).reshape(-1)
            old = table[START, rows].reshape(-1)
        advantages = torch.from_numpy(advantages_of(estimator, REWARD[rows.numpy()])).reshape(-1)
        for _ in range(2):
            log_probs = all_log_probs(logits)[START, rows].reshape(-1)
            optimizer.zero_grad()
            (LOSSES[loss](log_probs, old, advantages) * weights).sum().backward()
            optimizer.step()
    regret = 1.0 - expected_reward(logits.detach())
    assert regret.max() <= 0.01, f"regret {regret.round(4).tolist()}"
