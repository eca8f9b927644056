"""Building blocks of the estimators: token rewards, the reverse scan for returns, distillation and whitening.

Observation tokens (masked tokens inside a response, such as tool results) are not actions of the policy.
`observation_returns` sets how returns treat them. skip (default): they are not time steps, so the next step is the next
trained token. through: they are discounted like any other token. reset: no reward flows back across them.
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
    """Discount factor for later rewards (ppo, reinforce_plus_plus)."""
    observation_returns: Observations = opt("skip", needs=OWN_ADVANTAGES)
    """How returns treat tokens that the policy did not sample, such as tool results: skip them, count them as time
    steps (through), or end the discounted sum at them (reset, reinforce_plus_plus only)."""


def rewards_of_tokens(batch: RewardedBatch) -> list[Array]:
    """Returns the token rewards [R] of each sample, including the KL penalty. Unscored samples get a reward of 0."""
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
        raise DataError(f"the reward {reward} is not finite; mask unscored samples before computing returns")
    out = spread_advantage(0.0, mask, kl, kl_coef)
    trained = np.flatnonzero(np.asarray(mask) > 0)
    if len(trained):
        out[trained[-1]] += reward
    return out


def spread_advantage(
    advantage: float, mask: npt.NDArray[Any], kl: npt.NDArray[Any] | None = None, kl_coef: float = 0.0
) -> Array:
    """Returns advantage - kl_coef * kl at each trained token [R], zero where masked.

    This is how estimators that compare rewards within a group apply the KL penalty: after subtracting the baseline.
    """
    trained = np.asarray(mask) > 0
    if kl is None or not kl_coef:
        return np.where(trained, float(advantage), 0.0)
    return np.where(trained, float(advantage) - kl_coef * np.asarray(kl, np.float64), 0.0)


Floats = npt.NDArray[np.float64]
CHUNK_TOKENS = 128


def reverse_scan(x: Floats, decay: float, chunk: int = CHUNK_TOKENS) -> Floats:
    """Computes y_t = x_t + decay * y_{t+1} [R], exactly, in float64.

    Within a chunk, the recursion is a product with an upper triangular matrix of powers of `decay`, computed for all
    chunks at once. Only the carry from chunk to chunk is sequential.
    """
    assert chunk > 0, chunk
    if decay == 1.0:
        total: Floats = np.cumsum(x[::-1])[::-1]
        return total
    num = -(-len(x) // chunk)
    padded = np.zeros(num * chunk, np.float64)
    padded[: len(x)] = x  # trailing zeros do not change the recursion
    powers = _powers(float(decay), chunk)
    out: Floats = padded.reshape(num, chunk) @ powers.T
    to_next = decay * powers[:, -1]
    for i in range(num - 2, -1, -1):
        out[i] += to_next * out[i + 1, 0]
    return out.reshape(-1)[: len(x)]


@lru_cache(maxsize=8)
def _powers(decay: float, chunk: int) -> Floats:
    """Returns the matrix [chunk, chunk] with decay^(j - i) at row i, column j >= i, and zeros below the diagonal."""
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
    """Returns A - coef * (log student - log teacher) [R], zero where masked. Apply it before whitening.

    On-policy distillation as part of the advantage (Agarwal et al. 2023, GKD, arXiv:2306.13649; Lu et al. 2025,
    "On-policy distillation"): the reward of each token is the teacher's log-prob minus the student's.
    """
    trained = np.asarray(mask) > 0
    out = np.zeros(trained.shape)
    excess = np.asarray(student_log_probs, np.float64)[trained] - np.asarray(teacher_log_probs, np.float64)[trained]
    out[trained] = np.asarray(advantages, np.float64)[trained] - coef * excess
    return out


WHITEN_EPSILON = 1e-8
"""Added to the variance."""


def whiten(advantages_SR: Sequence[npt.NDArray[Any]], mask_S: Sequence[npt.NDArray[Any]]) -> list[Floats]:
    """Normalizes advantages to zero mean and unit variance over all trained tokens of the batch (REINFORCE++,
    arXiv:2501.03262). Returns one array per sample [R], zero where masked.

    Returns zeros if there are fewer than two trained tokens or all advantages are equal. Statistics are over tokens, so
    long responses weigh more. Unscored samples must be fully masked. There are two passes, because subtracting two
    large moments would fail at an offset of 1000 in float32. The sums of samples are added exactly (Shewchuk 1997,
    `math.fsum`), so the result does not depend on the order of samples. The variance divides by N - 1.
    """
    assert len(advantages_SR) == len(mask_S), f"{len(advantages_SR)} advantages for {len(mask_S)} masks"
    values = [np.asarray(a, np.float64) for a in advantages_SR]
    tokens = trained_parts(values, mask_S)
    num_tokens = sum(map(len, tokens))
    if num_tokens < 2 or min(t.min() for t in tokens) == max(t.max() for t in tokens):
        return [np.zeros(a.shape) for a in values]
    mean = math.fsum(float(t.sum()) for t in tokens) / num_tokens
    variance = math.fsum(float(np.square(t - mean).sum()) for t in tokens) / (num_tokens - 1)
    scale = math.sqrt(variance + WHITEN_EPSILON)
    return [np.where(np.asarray(m) > 0, (a - mean) / scale, 0.0) for a, m in zip(values, mask_S, strict=True)]


def trained_parts(values_SR: Sequence[npt.NDArray[Any]], mask_S: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    """Returns each sample's values at its trained tokens, if it has any, without copying if all are trained."""
    parts = []
    for values, mask in zip(values_SR, mask_S, strict=True):
        trained = np.asarray(mask) > 0
        parts.append(values if trained.all() else values[trained])
    return [part for part in parts if len(part)]
