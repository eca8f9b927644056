"""Train-inference mismatch: the difference between the trainer's and the engine's log-probs of the same tokens.

It is the first sign of a wrong weight, template or temperature, or of a stale engine. Tokens sampled with the trainer's
current weight version must agree up to rounding, so a difference above a dtype-dependent limit stops the run. Tokens of
other versions (partial rollouts, asynchronous training) are expected to differ and have their own metric. If requests
continue with an old KV cache (`in_place`), or if experts are replayed, that metric also includes current tokens that
follow older ones in a sample, because they depend on results of older versions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.core.batch import TrainBatch
from slime.core.errors import NumericsError
from slime.core.sample import NOT_SAMPLED
from slime.training.step.micro_batch import MicroBatch, Places

LIMITS: dict[torch.dtype, tuple[str, float]] = {
    torch.float32: ("max", 1e-3),
    torch.bfloat16: ("mean", 1e-1),
    torch.float16: ("mean", 2e-2),
}
"""Training dtype -> the statistic to limit, and its default limit in nats. `--mismatch-limit` overrides the limit.

In float32, engines agree to 1e-6 on tiny models, whereas a wrong weight causes 0.1 or more. In half precision, single
tokens of real models differ by 1 or more, so the mean is limited instead."""

_LOW, _HIGH, _BINS = -9.0, 3.0, 1200
"""Histogram of log10(difference), with bins 2.3 % wide. All ranks use the same bins, so one all-reduce merges them."""


@dataclass(slots=True)
class WorstToken:
    """The token with the largest difference on one rank."""

    diff: float = -1.0
    """Absolute difference of the log-probs, in nats."""
    position: int = -1
    """Position of its sample in the batch."""
    offset: int = -1
    trainer: float = 0.0
    engine: float = 0.0


class MismatchMeter:
    """Differences accumulated over micro-batches. `finish` reduces them over the group and checks the limit."""

    def __init__(self, version: int, device: torch.device, *, mixes_versions: bool = False) -> None:
        """`mixes_versions`: if a sample has several versions, its newest tokens depend on results of older versions."""
        self._version, self._mixes_versions = version, mixes_versions
        self._device = device
        self._sums = torch.zeros(5, dtype=torch.float64, device=device)
        self._histogram = torch.zeros(_BINS, dtype=torch.float64, device=device)
        self._pending: list[tuple[Places, Tensor]] = []
        """(places, [4] float64: difference, index, log-probs of trainer and engine of the worst token)."""

    def add(self, batch: MicroBatch, log_probs: Tensor) -> None:
        """Adds the trainer's detached `log_probs` [R]. Only `finish` waits for the device."""
        if batch.target_tokens.numel() == 0:
            return
        sampled = batch.sampled > 0
        current = sampled & (batch.versions == self._version)
        if self._mixes_versions:
            older = (batch.versions != self._version) & (batch.versions != NOT_SAMPLED)
            current &= batch.sequences.spread(batch.sequences.sum(older.float())) == 0
        zero = torch.zeros_like(log_probs)
        diff = torch.where(sampled, (log_probs - torch.where(sampled, batch.rollout_log_probs, zero)).abs(), zero)
        stale = sampled & ~current
        own = torch.where(current, diff, zero)
        self._sums += torch.stack([own.double().sum(), current.sum(), diff.double().sum(), sampled.sum(), stale.sum()])
        bins = torch.clamp(
            ((own.clamp_min(1e-9).log10() - _LOW) / (_HIGH - _LOW) * _BINS).nan_to_num(_BINS - 1.0), 0, _BINS - 1
        )
        self._histogram.scatter_add_(0, bins.long(), current.double())
        # argmax treats NaN as the largest value.
        ranked = torch.where(current, diff, zero - 1)
        worst = ranked.argmax(keepdim=True)  # a 0-d index would be copied to the host
        found = [ranked.gather(0, worst), worst, log_probs.gather(0, worst), batch.rollout_log_probs.gather(0, worst)]
        self._pending.append((batch.places, torch.cat([x.double() for x in found])))

    def finish(
        self, batch: TrainBatch, *, dtype: torch.dtype, limit: float | None, group: dist.ProcessGroup
    ) -> dict[str, float]:
        """Returns the metrics of the whole step. Raises `NumericsError` on every rank if the limit is exceeded.

        Collective over `group`.
        """
        numbers = torch.cat([self._sums, self._histogram])
        dist.all_reduce(numbers, group=group)
        own = torch.cat([numbers, *(worst for _, worst in self._pending)]).cpu()  # one copy
        numbers, worst = own[: len(numbers)], self._worst(own[len(numbers) :].view(-1, 4).tolist())
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, worst, group=group)
        top: WorstToken = max(gathered, key=lambda w: math.inf if math.isnan(w.diff) else w.diff)
        own_sum, num_current, mismatch_sum, num_sampled, num_stale = numbers[:5].tolist()
        metrics = {"train/stale_tokens": num_stale}
        if num_sampled:
            metrics["train/train_rollout_logprob_abs_diff"] = mismatch_sum / num_sampled
        if num_stale:
            metrics["train/train_rollout_logprob_abs_diff_stale"] = (mismatch_sum - own_sum) / num_stale
        if num_current:
            metrics["train/train_rollout_logprob_abs_diff_max"] = top.diff
            metrics["train/train_rollout_logprob_abs_diff_current"] = own_sum / num_current
            metrics["train/train_rollout_logprob_abs_diff_p99"] = min(_percentile(numbers[5:], 0.99), top.diff)
            _check_limit(batch, top, own_sum / num_current, dtype=dtype, limit=limit, version=self._version)
        return metrics

    def _worst(self, found: list[list[float]]) -> WorstToken:
        best = WorstToken()
        for (places, _), (value, index, trainer, engine) in zip(self._pending, found, strict=True):
            if value > best.diff or math.isnan(value):
                position, offset = places.of_token(int(index))
                best = WorstToken(value, position, offset, trainer, engine)
        return best


def _percentile(histogram: Tensor, share: float) -> float:
    cumulative = histogram.cumsum(0)
    index = int((cumulative < share * float(cumulative[-1])).sum())
    return float(10 ** (_LOW + (index + 1) * (_HIGH - _LOW) / _BINS))


def _check_limit(
    batch: TrainBatch, worst: WorstToken, mean: float, *, dtype: torch.dtype, limit: float | None, version: int
) -> None:
    figure, default = LIMITS[dtype]
    bound = default if limit is None else limit
    value = worst.diff if figure == "max" else mean
    if value <= bound:  # also false for NaN
        return
    sample = batch.samples[worst.position]
    token = int(sample.tokens[sample.num_tokens - sample.response_length + worst.offset])
    raise NumericsError(
        f"the {figure} train-inference mismatch of {value:.3g} exceeds the limit of {bound:.3g} for {dtype}: trainer "
        f"and engine do not evaluate the same model on the same tokens. Worst token: sample {sample.index} of group "
        f"{sample.group_index}, response token {worst.offset} (id {token}), trainer {worst.trainer:.6f}, engine "
        f"{worst.engine:.6f}, both version {version}. Check --sglang-dtype, --rollout-temperature and the weight "
        f"sync; --mismatch-limit changes the limit"
    )
