"""PPO advantages: generalized advantage estimation (Schulman et al. 2015, arXiv:1506.02438) as an exact chunked scan.

delta_t = r_t + gamma * V_{t+1} - V_t; A_t = delta_t + gamma * lambd * A_{t+1}; return = A + V. V and A are 0 after the
last token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, assert_never

import numpy as np
import numpy.typing as npt

from slime.algorithms.advantages import ESTIMATORS, Array, CriticEstimator, Estimate, RewardedBatch, where_trained
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
        assert self.observation_returns != "reset", "rejected by `check`"
        pairs = [
            generalized_advantages(r, v, m, self.gamma, self.lambd, self.observation_returns)
            for r, v, m in zip(rewards_of_tokens(batch), batch.values, batch.masks, strict=True)
        ]
        advantages, returns = [a for a, _ in pairs], [r for _, r in pairs]
        return Estimate(where_trained(advantages, batch.masks), where_trained(returns, batch.masks))

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
    rewards = np.where(trained, np.asarray(token_rewards, np.float64), 0.0)[steps]
    value = np.asarray(values, np.float64)[steps]
    delta = rewards + gamma * np.append(value[1:], 0.0) - value if len(value) else rewards
    advantages, returns = np.zeros(trained.shape), np.zeros(trained.shape)
    advantages[steps] = reverse_scan(delta, gamma * lambd, chunk)
    returns[steps] = advantages[steps] + value
    return advantages, returns
