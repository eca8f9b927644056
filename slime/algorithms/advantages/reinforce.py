"""REINFORCE++ (Hu 2025, arXiv:2501.03262): A_t = r_t + gamma * A_{t+1} with token rewards r_t, then whitened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, assert_never

import numpy as np
import numpy.typing as npt

from slime.algorithms.advantages import ESTIMATORS, AdvantageEstimator, Array, Estimate, RewardedBatch, where_trained
from slime.algorithms.advantages.grpo import GroupEstimator, group_advantages
from slime.algorithms.advantages.returns import Observations, ReturnSettings, reverse_scan, rewards_of_tokens


@ESTIMATORS.register("reinforce_plus_plus")
@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus(ReturnSettings, AdvantageEstimator):
    """Discounted returns without a baseline."""

    whitens: ClassVar[bool] = True

    def estimate(self, batch: RewardedBatch) -> Estimate:
        returns = [
            discounted_returns(r, m, self.gamma, self.observation_returns)
            for r, m in zip(rewards_of_tokens(batch), batch.masks, strict=True)
        ]
        return Estimate(where_trained(returns, batch.masks))


def discounted_returns(
    token_rewards: npt.NDArray[Any], mask: npt.NDArray[Any], gamma: float, observations: Observations = "skip"
) -> Array:
    """Computes R_t = r_t + gamma * R_{t+1} over a sample [R]. Values at masked positions are meaningless."""
    trained = np.asarray(mask) > 0
    rewards = np.where(trained, np.asarray(token_rewards, np.float64), 0.0)
    if observations == "through":
        return reverse_scan(rewards, gamma)
    if observations == "skip":
        out = np.zeros_like(rewards)
        out[trained] = reverse_scan(rewards[trained], gamma)
        return out
    if observations == "reset":
        parts = np.split(rewards, np.flatnonzero(~trained))
        return np.concatenate([reverse_scan(part, gamma) for part in parts])
    assert_never(observations)


@ESTIMATORS.register("reinforce_plus_plus_baseline")
@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlusBaseline(GroupEstimator):
    """A = R - group mean at every token, then whitened over the batch (Hu 2025, arXiv:2501.03262)."""

    whitens: ClassVar[bool] = True

    def compared(self, rewards: Array, groups: npt.NDArray[np.int64], executions: npt.NDArray[np.int64]) -> Array:
        return group_advantages(rewards, groups, executions, scale="none")
