"""Rewards of tokens, and what those estimators share that sum them.

Observation tokens (masked, inside a response) take no step of the policy. `observation_returns` says what a return does
there: skip: they take no time, the next trained token counts as the next step (default); through: they discount like
any token; reset: nothing flows back across them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from slime.algorithms.advantages import Array, RewardedBatch
from slime.core.errors import DataError
from slime.settings.conditions import OWN_ADVANTAGES
from slime.settings.fields import opt

Observations = Literal["skip", "through", "reset"]


@dataclass(frozen=True, kw_only=True)
class ReturnSettings:
    """How the rewards of later tokens count."""

    gamma: float = opt(1.0, ge=0, le=1, needs=OWN_ADVANTAGES)
    """Discount of later tokens' rewards (ppo, reinforce_plus_plus)."""
    observation_returns: Observations = opt("skip", needs=OWN_ADVANTAGES)
    """What tokens that the policy did not write (tool results) do to returns: they are skipped, count as time steps, or
    end the discounted sum (reinforce_plus_plus only)."""


def rewards_of_tokens(batch: RewardedBatch) -> list[Array]:
    """Token rewards [R] of each sample, the KL to the reference in them; an unscored sample has none."""
    return [
        token_rewards(0.0 if np.isnan(reward) else float(reward), mask, kl, batch.kl_coef)
        for reward, mask, kl in zip(batch.rewards, batch.masks, batch.kl_S, strict=True)
    ]


def token_rewards(
    reward: float, mask: npt.NDArray[Any], kl: npt.NDArray[Any] | None = None, kl_coef: float = 0.0
) -> Array:
    """-kl_coef * kl at each trained token [R], plus `reward` at the last one; zero elsewhere.

    Raises `DataError` if the reward is not finite: an unscored sample has no returns and must be masked before.
    """
    if not math.isfinite(reward):
        raise DataError(f"got reward {reward}, because the sample is unscored; mask it before its returns are computed")
    out = spread_advantage(0.0, mask, kl, kl_coef)
    trained = np.flatnonzero(np.asarray(mask) > 0)
    if len(trained):
        out[trained[-1]] += reward
    return out


def spread_advantage(
    advantage: float, mask: npt.NDArray[Any], kl: npt.NDArray[Any] | None = None, kl_coef: float = 0.0
) -> Array:
    """The advantage of a sample at each trained token, minus kl_coef * kl there [R]; zero where masked.

    This is how the KL penalty acts in the estimators that compare rewards within a group: after the baseline.
    """
    values = np.full(np.shape(mask), float(advantage))
    if kl is not None and kl_coef:
        values = values - kl_coef * np.asarray(kl, np.float64)
    return np.where(np.asarray(mask) > 0, values, 0.0)
