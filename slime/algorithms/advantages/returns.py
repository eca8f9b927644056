"""Building blocks of the estimators: token rewards, the reverse scan for returns, distillation and whitening.

Observation tokens (masked tokens inside a response, such as tool results) are not actions of the policy.
`observation_returns` sets how returns treat them. skip (default): they are not time steps, so the next step is the next
trained token. through: they are discounted like any other token. reset: no reward flows back across them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from slime.algorithms.advantages import (
    Array,
    Arrays,
    Computed,
    RewardedBatch,
    Spread,
    Trained,
    is_trained,
    kept,
    spread,
)
from slime.core.errors import DataError
from slime.core.sample import credited_rewards
from slime.settings.conditions import OWN_ADVANTAGES
from slime.settings.fields import opt

Observations = Literal["skip", "through", "reset"]


@dataclass(frozen=True, kw_only=True)
class Discounts:
    gamma: float = opt(1.0, ge=0, le=1, needs=OWN_ADVANTAGES)
    """Discount factor for later rewards: per token (ppo, reinforce_plus_plus) or per turn (grpo_turn)."""


@dataclass(frozen=True, kw_only=True)
class ReturnSettings(Discounts):
    observation_returns: Observations = opt("skip", needs=OWN_ADVANTAGES)
    """How returns treat tokens that the policy did not sample, such as tool results: skip them, count them as time
    steps (through), or end the discounted sum at them (reset, reinforce_plus_plus only)."""


TokenRewards = npt.NDArray[Any] | float
"""[R] rewards of a sample's tokens; or the reward of its last trained token, if those of all others are 0."""


def rewards_of_tokens(batch: RewardedBatch) -> Callable[[int], TokenRewards]:
    """Returns a function from the position of a sample to its token rewards, including the KL penalty and the rewards
    that the sample has at its tokens. Unscored samples get a reward of 0."""
    rewards, coef = np.where(np.isnan(batch.rewards), 0.0, batch.rewards), batch.kl_coef
    kl_S, own_S = batch.kl_S, batch.token_rewards_S

    def one(p: int) -> TokenRewards:
        reward, kl, own = float(rewards[p]), kl_S[p] if coef else None, own_S[p]
        return reward if kl is None and own is None else token_rewards(reward, batch.masks[p], kl, coef, own)

    return one


def token_rewards(
    reward: float,
    mask: npt.NDArray[Any],
    kl: npt.NDArray[Any] | None = None,
    kl_coef: float = 0.0,
    own: npt.NDArray[Any] | None = None,
) -> Array:
    """Returns own - kl_coef * kl at each trained token [R], plus `reward` at the last one; zero elsewhere.

    `own`: the sample's token rewards [R], which are credited to trained tokens. Raises `DataError` if the reward is not
    finite: an unscored sample must be masked first.
    """
    out = np.zeros(len(mask)) if kl is None or not kl_coef else spread_advantage(0.0, mask, kl, kl_coef)
    if own is not None:
        out = out + credited_rewards(own, mask)
    return add_rewards(out, reward, is_trained(mask))


def add_rewards(out: Array, rewards: TokenRewards, trained: Trained) -> Array:
    """Adds the rewards of trained tokens to `out` [R] in place, and returns it. Raises the error of `token_rewards`."""
    if not isinstance(rewards, float):
        out += kept(np.asarray(rewards, np.float64), trained)
        return out
    if not math.isfinite(rewards):
        raise DataError(f"the reward {rewards} is not finite; mask unscored samples before computing returns")
    last = trained.tobytes().rfind(b"\1")  # NumPy would read all tokens
    if last >= 0:
        out[last] += rewards
    return out


def spread_advantage(
    advantage: float, mask: npt.NDArray[Any], kl: npt.NDArray[Any] | None = None, kl_coef: float = 0.0
) -> Array:
    """Returns advantage - kl_coef * kl at each trained token [R], zero where masked.

    This is how estimators that compare rewards within a group apply the KL penalty: after subtracting the baseline.
    """
    if kl is None or not kl_coef:
        return spread(advantage, mask)
    return kept(float(advantage) - kl_coef * np.asarray(kl, np.float64), mask)


Floats = npt.NDArray[np.float64]
CHUNK_TOKENS = 16
SHORT_TOKENS = 128
"""Up to this length, one product with a matrix takes less time than chunks."""


def reverse_scan(x: Floats, decay: float, chunk: int = CHUNK_TOKENS) -> Floats:
    """Computes y_t = x_t + decay * y_{t+1} [R], exactly, in float64. Overwrites `x` [R].

    Within a chunk, the recursion is a product with a triangular matrix of powers of `decay`, computed for all chunks at
    once. The results at the starts of chunks follow the same recursion, with decay^chunk from one to the next. They are
    computed first, and each is added to the last x of the chunk before it. The first chunk may be shorter.
    """
    assert chunk > 1, chunk
    if len(x) <= SHORT_TOKENS:
        return x @ _powers(float(decay), SHORT_TOKENS)[: len(x), : len(x)]
    powers, out, head = _powers(float(decay), chunk), np.empty(len(x)), len(x) % chunk
    chunks = x[head:].reshape(-1, chunk)
    starts = reverse_scan(chunks @ powers[:, 0], decay**chunk, chunk)
    chunks[:-1, -1] += decay * starts[1:]
    np.matmul(chunks, powers, out=out[head:].reshape(-1, chunk))
    if head:
        x[head - 1] += decay * starts[:1].sum()
        np.matmul(x[:head], powers[:head, :head], out=out[:head])
    return out


@lru_cache(maxsize=64)
def _powers(decay: float, chunk: int) -> Floats:
    """Returns the matrix [chunk, chunk] with decay^(i - j) at row i, column j <= i, and zeros above the diagonal."""
    index = np.arange(chunk)
    exponent = index[:, None] - index[None, :]
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


@dataclass(frozen=True, slots=True)
class Moments:
    """Statistics of values over trained tokens, of each of S samples."""

    nums: npt.NDArray[np.int64]
    """[S] number of trained tokens."""
    totals: Floats
    """[S] sum of the values."""
    squares: Floats
    """[S] sum of the squared differences from the sample's own mean."""
    least: Floats
    """[S] the smallest value; infinity without trained tokens."""
    largest: Floats
    """[S] the largest value; -infinity without trained tokens."""

    @property
    def num_tokens(self) -> int:
        return int(self.nums.sum())

    @property
    def mean(self) -> float:
        """The mean over all trained tokens; 0 without any."""
        return math.fsum(self.totals.tolist()) / max(1, self.num_tokens)

    @property
    def variation(self) -> float:
        """The sum of squared differences from `mean` (Chan et al. 1979, in two passes)."""
        shift = self.totals / np.maximum(self.nums, 1) - self.mean
        return math.fsum((self.squares + self.nums * np.square(shift)).tolist())

    def scaled(self, offset: float, scale: float) -> Moments:
        """Returns the moments of (values - offset) / scale."""
        totals, squares = (self.totals - self.nums * offset) / scale, self.squares / scale**2
        return Moments(self.nums, totals, squares, (self.least - offset) / scale, (self.largest - offset) / scale)


@dataclass(frozen=True, slots=True)
class Together:
    """How ranks divide the statistics of a batch: each computes those of every `size`-th sample."""

    rank: int = 0
    size: int = 1
    add: Callable[[Floats], Floats] = np.asarray
    """Collective. Returns the sum of an array over all ranks."""


ALONE = Together()


def moments(
    values: Arrays,
    masks: Arrays,
    nums: npt.NDArray[np.int64] | None = None,
    *,
    beside: Sequence[Arrays] = (),
    together: Together = ALONE,
) -> tuple[Moments, Floats]:
    """Returns the moments of a batch, and the totals [len(beside), S] of the arrays in `beside`, which are zero where
    masked. Both are read sample by sample, because an estimator computes advantages and returns together. Collective
    over `together`: the statistics of a sample do not depend on the rank that computes them, and the others add zero.

    `nums` [S]: numbers of trained tokens, if they are known.
    """
    keep_freed_memory()
    if nums is None:
        nums = np.asarray([np.count_nonzero(np.asarray(m) > 0) for m in masks], np.int64)
    found, some = np.zeros((4 + len(beside), len(masks))), nums > 0
    even = isinstance(values, Spread)
    for p in range(together.rank, 0 if even and not beside else len(masks), together.size):
        if some[p] and not even:
            trained = np.asarray(values[p], np.float64)
            trained = trained if nums[p] == len(masks[p]) else trained[np.asarray(masks[p]) > 0]
            total = float(trained.sum())
            found[:4, p] = total, _squares(trained, total), trained.min(), trained.max()
        found[4:, p] = [arrays[p].sum() for arrays in beside]
    if beside or not even:
        found = together.add(found)
    if isinstance(values, Spread):
        found[0], found[2], found[3] = nums * values.values, values.values, values.values
    found[2, ~some], found[3, ~some] = math.inf, -math.inf
    return Moments(nums, *found[:4]), found[4:]


def keep_freed_memory() -> None:
    """Lets the process reuse freed arrays of up to 32 MB. Otherwise, glibc returns them to the system, and each new
    array of a sample costs ten times as much as the computation in it, for pages that the system clears."""
    np.empty(
        32_000_000, np.uint8
    )  # freeing a mapped block raises the size from which blocks are mapped; no page is used


BLOCK_TOKENS = 8192
"""The size of temporary arrays that stay in a core's cache."""


def _squares(values: Floats, total: float) -> float:
    """Returns the sum of squared differences from the mean. `total`: the sum of `values`.

    If the mean is small against the deviations, the sum of squares loses at most six bits to it and one pass is enough.
    """
    mean, starts = total / len(values), range(0, len(values), BLOCK_TOKENS)
    parts = [values[start : start + BLOCK_TOKENS] for start in starts]
    whole = math.fsum(float(part @ part) for part in parts)
    if whole - total * mean >= whole / 64:
        return whole - total * mean
    return math.fsum(float(np.square(part - mean).sum()) for part in parts)


def whiten(advantages_SR: Sequence[npt.NDArray[Any]], mask_S: Sequence[npt.NDArray[Any]]) -> Arrays:
    """Normalizes advantages to zero mean and unit variance over all trained tokens of the batch (REINFORCE++,
    arXiv:2501.03262). Returns one array per sample [R], zero where masked.

    Returns zeros if there are fewer than two trained tokens or all advantages are equal. Statistics are over tokens, so
    long responses weigh more. Unscored samples must be fully masked. There are two passes, because subtracting two
    large moments would fail at an offset of 1000 in float32. The sums of samples are added exactly (Shewchuk 1997,
    `math.fsum`), so the result does not depend on the order of samples. The variance divides by N - 1.
    """
    assert len(advantages_SR) == len(mask_S), f"{len(advantages_SR)} advantages for {len(mask_S)} masks"
    return whitened(advantages_SR, mask_S, moments(advantages_SR, mask_S)[0])[0]


def whitened(values: Arrays, masks: Arrays, found: Moments) -> tuple[Arrays, Moments]:
    """Returns the result of `whiten`, and its moments. `found`: the moments of `values`."""
    num_tokens = found.num_tokens
    if num_tokens < 2 or found.least.min() == found.largest.max():
        zeros = np.zeros(len(masks))
        return Spread(zeros, masks), moments(Spread(zeros, masks), masks, found.nums)[0]
    mean, scale = found.mean, math.sqrt(found.variation / (num_tokens - 1) + WHITEN_EPSILON)
    if isinstance(values, Spread):
        even = Spread((values.values - mean) / scale, masks)
        return even, moments(even, masks, found.nums)[0]

    def one(p: int) -> Floats:
        return kept((np.asarray(values[p], np.float64) - mean) / scale, masks[p])

    return Computed(len(masks), one), found.scaled(mean, scale)
