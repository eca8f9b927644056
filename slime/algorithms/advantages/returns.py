"""Token rewards, and what estimators that sum them share: returns, the reverse scan and whitening.

Observation tokens (masked, inside a response) are not steps of the policy. `observation_returns` says how returns treat
them. skip (default): they are not time steps; the next trained token is the next step. through: they are discounted
like any other token. reset: no reward flows back across them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
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
    gamma: float = opt(1.0, ge=0, le=1, needs=OWN_ADVANTAGES)
    """Discount of later tokens' rewards (ppo, reinforce_plus_plus)."""
    observation_returns: Observations = opt("skip", needs=OWN_ADVANTAGES)
    """How returns treat tokens that the policy did not write (tool results): skip them, count them as time steps
    (through), or end the discounted sum there (reset, only reinforce_plus_plus)."""


def rewards_of_tokens(batch: RewardedBatch) -> list[Array]:
    """Returns the token rewards [R] of each sample, including the KL penalty. An unscored sample has no reward."""
    return [
        token_rewards(0.0 if np.isnan(reward) else float(reward), mask, kl, batch.kl_coef)
        for reward, mask, kl in zip(batch.rewards, batch.masks, batch.kl_S, strict=True)
    ]


def token_rewards(
    reward: float, mask: npt.NDArray[Any], kl: npt.NDArray[Any] | None = None, kl_coef: float = 0.0
) -> Array:
    """Returns -kl_coef * kl at each trained token [R], plus `reward` at the last one; zero elsewhere.

    Raises `DataError` if the reward is not finite: an unscored sample must be masked first.
    """
    if not math.isfinite(reward):
        raise DataError(f"an unscored sample has reward {reward}; mask it before its returns are computed")
    out = spread_advantage(0.0, mask, kl, kl_coef)
    trained = np.flatnonzero(np.asarray(mask) > 0)
    if len(trained):
        out[trained[-1]] += reward
    return out


def spread_advantage(
    advantage: float, mask: npt.NDArray[Any], kl: npt.NDArray[Any] | None = None, kl_coef: float = 0.0
) -> Array:
    """Returns the advantage of a sample minus kl_coef * kl, at each trained token [R]; zero where masked.

    Estimators that compare rewards within a group apply the KL penalty this way, after subtracting the baseline.
    """
    values = np.full(np.shape(mask), float(advantage))
    if kl is not None and kl_coef:
        values = values - kl_coef * np.asarray(kl, np.float64)
    return np.where(np.asarray(mask) > 0, values, 0.0)


Floats = npt.NDArray[np.float64]
CHUNK_TOKENS = 128


def reverse_scan(x: Floats, decay: float, chunk: int = CHUNK_TOKENS) -> Floats:
    """Returns y [R] with y_t = x_t + decay * y_{t+1}, exact, in float64.

    Within a chunk the recursion is a product with the upper triangular matrix of the powers of `decay`, for all chunks
    together. Only the carry from each chunk to the previous chunk is serial.
    """
    assert chunk > 0, chunk
    num = -(-len(x) // chunk)
    padded = np.zeros(num * chunk, np.float64)
    padded[: len(x)] = x  # zeros after the end do not change the recursion
    powers = _powers(float(decay), chunk)
    out: Floats = padded.reshape(num, chunk) @ powers.T
    to_next = decay * powers[:, -1]
    for i in range(num - 2, -1, -1):
        out[i] += to_next * out[i + 1, 0]
    return out.reshape(-1)[: len(x)]


@lru_cache(maxsize=8)
def _powers(decay: float, chunk: int) -> Floats:
    """Returns decay^(j - i) [chunk, chunk] at row i and column j >= i; zero below the diagonal."""
    index = np.arange(chunk)
    exponent = index[None, :] - index[:, None]
    return np.where(exponent >= 0, decay ** np.maximum(exponent, 0), 0.0)


def distilled(
    advantages: npt.NDArray[Any],
    student_log_probs: npt.NDArray[Any],
    teacher_log_probs: npt.NDArray[Any],
    mask: npt.NDArray[Any],
    coef: float,
) -> Array:
    """Returns A - coef * (log student - log teacher), zero where masked; all [R]. Call it before whitening.

    On-policy distillation as a term of the advantage (Agarwal et al. 2023, GKD, arXiv:2306.13649; Lu et al. 2025,
    "On-policy distillation"): each token is rewarded by the teacher's log-prob minus the student's.
    """
    trained = np.asarray(mask) > 0
    out = np.zeros(trained.shape)
    excess = np.asarray(student_log_probs, np.float64)[trained] - np.asarray(teacher_log_probs, np.float64)[trained]
    out[trained] = np.asarray(advantages, np.float64)[trained] - coef * excess
    return out


WHITEN_EPSILON = 1e-8
"""Added to the variance."""


def whiten(advantages_SR: Sequence[npt.NDArray[Any]], mask_S: Sequence[npt.NDArray[Any]]) -> list[Floats]:
    """Advantages with zero mean and unit variance over all trained tokens of the batch (REINFORCE++, arXiv:2501.03262);
    per sample [R], zero where masked.

    All zeros if there are fewer than two trained tokens or all have the same advantage. Statistics are over tokens, so
    long responses count more. The mask of an unscored sample must be zero. Two passes with exact sums (Shewchuk 1997,
    `math.fsum`) avoid the difference of two large moments, which fails at an offset of 1000 in float32, and make the
    order of samples irrelevant. The variance divides by N - 1.
    """
    assert len(advantages_SR) == len(mask_S), f"{len(advantages_SR)} advantages for {len(mask_S)} masks"
    keep = [np.asarray(m) > 0 for m in mask_S]
    values = [np.asarray(a, np.float64) for a in advantages_SR]
    tokens = np.concatenate([np.zeros(0), *(a[k] for a, k in zip(values, keep, strict=True))])
    if len(tokens) < 2 or np.ptp(tokens) == 0:
        return [np.zeros(k.shape) for k in keep]
    mean = math.fsum(tokens.tolist()) / len(tokens)
    variance = math.fsum(np.square(tokens - mean).tolist()) / (len(tokens) - 1)
    scale = math.sqrt(variance + WHITEN_EPSILON)
    return [np.where(k, (a - mean) / scale, 0.0) for a, k in zip(values, keep, strict=True)]
