"""PPO advantages: generalized advantage estimation (Schulman et al. 2015, arXiv:1506.02438) as an exact chunked scan.

delta_t = r_t + gamma * V_{t+1} - V_t; A_t = delta_t + gamma * lambd * A_{t+1}; return = A + V. V and A are 0 after the
last token. So the returns follow R_t = r_t + gamma * (1 - lambd) * V_{t+1} + gamma * lambd * R_{t+1}, which is what is
computed; A = R - V.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, assert_never

import numpy as np
import numpy.typing as npt

from slime.algorithms.advantages import ESTIMATORS, Array, CriticEstimator, Estimate, RewardedBatch, is_trained, kept
from slime.algorithms.advantages.returns import (
    CHUNK_TOKENS,
    ReturnSettings,
    TokenRewards,
    add_rewards,
    reverse_scan,
    rewards_of_tokens,
)
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
        rewards, values = rewards_of_tokens(batch), batch.values

        @lru_cache(maxsize=1)  # advantages and returns of a sample are mostly read one after the other
        def both(p: int) -> tuple[Array, Array]:
            trained = is_trained(batch.masks[p])
            made = generalized_advantages(rewards(p), values[p], trained, self.gamma, self.lambd, through)
            return made if through == "skip" else (kept(made[0], trained), kept(made[1], trained))

        return Estimate(batch.computed(lambda p: both(p)[0]), batch.computed(lambda p: both(p)[1]))

    def check(self, args: Args) -> str | None:
        if self.observation_returns == "reset":
            return "--advantage-estimator ppo does not support --observation-returns reset; use skip or through"
        return None


def generalized_advantages(
    token_rewards: TokenRewards,
    values: npt.NDArray[Any],
    mask: npt.NDArray[Any],
    gamma: float,
    lambd: float,
    observations: Literal["skip", "through"] = "skip",
    chunk: int = CHUNK_TOKENS,
) -> tuple[Array, Array]:
    """Returns (advantages [R], returns [R]) of one sample. `values` and `mask` are [R].

    skip: observation tokens are not time steps; V_{t+1} is the value at the next trained token, and both results are 0
    at observation tokens. through: every token is a time step with its own value.
    """
    trained = is_trained(mask)
    if observations == "through":
        steps = np.ones_like(trained)
    elif observations == "skip":
        steps = trained
    else:
        assert_never(observations)
    value, whole = np.asarray(values, np.float64), bool(steps.all())
    if not whole:
        value = value[steps]
        token_rewards = token_rewards if isinstance(token_rewards, float) else np.asarray(token_rewards)[steps]
    x = np.empty(len(value))
    x[-1:] = 0.0  # the value after the last token is 0
    np.multiply(value[1:], gamma * (1 - lambd), out=x[:-1])
    add_rewards(x, token_rewards, trained[steps] if not whole else trained)
    found = reverse_scan(x, gamma * lambd, chunk)
    if whole:
        return np.subtract(found, value, out=x), found
    advantages, returns = np.zeros(trained.shape), np.zeros(trained.shape)
    advantages[steps], returns[steps] = found - value, found
    return advantages, returns
