"""REINFORCE++ (Hu 2025, arXiv:2501.03262): A_t = r_t + gamma * A_{t+1} with token rewards r_t, then whitened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, assert_never

import numpy as np
import numpy.typing as npt

from slime.algorithms.advantages import (
    ESTIMATORS,
    AdvantageEstimator,
    Array,
    Estimate,
    RewardedBatch,
    Spread,
    is_trained,
    kept,
)
from slime.algorithms.advantages.grpo import GroupEstimator, group_advantages
from slime.algorithms.advantages.returns import (
    Observations,
    ReturnSettings,
    TokenRewards,
    add_rewards,
    reverse_scan,
    rewards_of_tokens,
)


@ESTIMATORS.register("reinforce_plus_plus")
@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus(ReturnSettings, AdvantageEstimator):
    """Discounted returns without a baseline."""

    whitens: ClassVar[bool] = True

    def estimate(self, batch: RewardedBatch) -> Estimate:
        masks, gamma, observations = batch.masks, self.gamma, self.observation_returns
        only_at_the_end = batch.token_rewards is None and (batch.kl is None or not batch.kl_coef)
        if gamma == 1.0 and observations != "reset" and only_at_the_end:
            return Estimate(Spread(np.nan_to_num(batch.rewards, nan=0.0), masks))  # the reward comes after every token
        rewards = rewards_of_tokens(batch)

        def one(p: int) -> Array:
            trained = is_trained(masks[p])
            return kept(discounted_returns(rewards(p), trained, gamma, observations), trained)

        return Estimate(batch.computed(one))


def discounted_returns(
    token_rewards: TokenRewards, mask: npt.NDArray[Any], gamma: float, observations: Observations = "skip"
) -> Array:
    """Computes R_t = r_t + gamma * R_{t+1} over a sample [R]. Values at masked positions are meaningless."""
    trained = is_trained(mask)
    rewards = add_rewards(np.zeros(len(trained)), token_rewards, trained)
    if observations == "through" or (observations == "skip" and trained.all()):
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
