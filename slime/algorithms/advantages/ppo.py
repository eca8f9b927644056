"""PPO advantages: generalized advantage estimation (Schulman et al. 2015, arXiv:1506.02438) as an exact chunked scan.

delta_t = r_t + gamma * V_{t+1} - V_t; A_t = delta_t + gamma * lambd * A_{t+1}; return = A + V. V and A are 0 after the
last token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, assert_never

import numpy as np
import numpy.typing as npt

from slime.algorithms.advantages import ESTIMATORS, Array, CriticEstimator, Estimate, RewardedBatch, kept
from slime.algorithms.advantages.returns import CHUNK_TOKENS, ReturnSettings, reverse_scan, rewards_of_tokens
from slime.settings.conditions import OWN_ADVANTAGES
from slime.settings.fields import opt

if TYPE_CHECKING:
    from slime.settings import Args


@ESTIMATORS.register("ppo")
@dataclass(frozen=True, kw_only=True)
class ProximalAdvantages(ReturnSettings, CriticEstimator):
    lambd: float = opt(1.0, ge=0, le=1, needs=OWN_ADVANTAGES)
    """Lambda of generalized advantage estimation (ppo, arXiv:1506.02438)."""

    def estimate(self, batch: RewardedBatch) -> Estimate:
        assert batch.values is not None, "ppo needs the critic's values"
        observations = self.observation_returns
        assert observations != "reset", "rejected by `check`"
        through: Literal["skip", "through"] = observations
        rewards, values, masks = rewards_of_tokens(batch), batch.values, batch.masks

        @lru_cache(maxsize=1)  # advantages and returns of a sample are mostly read one after the other
        def both(p: int) -> tuple[Array, Array]:
            made = generalized_advantages(rewards[p], values[p], masks[p], self.gamma, self.lambd, through)
            return kept(made[0], masks[p]), kept(made[1], masks[p])

        return Estimate(batch.computed(lambda p: both(p)[0]), batch.computed(lambda p: both(p)[1]))

    def check(self, args: Args) -> str | None:
        if self.observation_returns == "reset":
            return "--advantage-estimator ppo does not support --observation-returns reset; use skip or through"
        return None


def generalized_advantages(
    token_rewards: npt.NDArray[Any],
    values: npt.NDArray[Any],
    mask: npt.NDArray[Any],
    gamma: float,
    lambd: float,
    observations: Literal["skip", "through"] = "skip",
    chunk: int = CHUNK_TOKENS,
) -> tuple[Array, Array]:
    """Returns (advantages [R], returns [R]) of one sample. All inputs are [R].

    skip: observation tokens are not time steps; V_{t+1} is the value at the next trained token, and both results are 0
    at observation tokens. through: every token is a time step with its own value.
    """
    trained = np.asarray(mask) > 0
    if observations == "through":
        steps = np.ones_like(trained)
    elif observations == "skip":
        steps = trained
    else:
        assert_never(observations)
    rewards, value = kept(np.asarray(token_rewards, np.float64), trained), np.asarray(values, np.float64)
    if whole := bool(steps.all()):
        rewards, value = np.array(rewards), value
    else:
        rewards, value = rewards[steps], value[steps]
    rewards -= value
    rewards[:-1] += gamma * value[1:]  # the value after the last token is 0
    found = reverse_scan(rewards, gamma * lambd, chunk)
    if whole:
        return found, found + value
    advantages, returns = np.zeros(trained.shape), np.zeros(trained.shape)
    advantages[steps], returns[steps] = found, found + value
    return advantages, returns
