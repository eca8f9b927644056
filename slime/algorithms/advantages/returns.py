"""Rewards of tokens, and their discounted sums (REINFORCE++, Hu 2025, arXiv:2501.03262).

Observation tokens (masked, inside a response) take no step of the policy. `observations` says what a return does there:
skip: they take no time, the next trained token counts as the next step (default); through: they discount like any
token; reset: nothing flows back across them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from slime.algorithms.advantages.scan import reverse_scan
from slime.core.errors import ConfigError, DataError

OBSERVATIONS = ("skip", "through", "reset")

Array = npt.NDArray[np.float64]


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


def discounted_returns(
    token_rewards: npt.NDArray[Any], mask: npt.NDArray[Any], gamma: float, observations: str = "skip"
) -> Array:
    """R_t = r_t + gamma * R_{t+1} over the tokens of one sample [R]; what stands at masked positions is not trained.

    Raises `ConfigError` on an unknown value of `observations`.
    """
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
    raise ConfigError(f"got --observation-returns {observations!r}; choose one of {', '.join(OBSERVATIONS)}")
