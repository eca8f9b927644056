"""What the whole batch decides, on the host, on every rank alike, before anything is cut.

`prepare` makes the schedule and the weight of every token in the loss of its step. Forward passes then give `Signals`,
made whole on every rank; `with_signals` adds advantages and returns (`targets`). What is cut afterwards only carries
numbers along, so no result can depend on the cut.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slime.algorithms.aggregation import token_weights
from slime.core.batch import TrainBatch, TrainSample
from slime.core.errors import DataError
from slime.core.sample import NOT_SAMPLED
from slime.data.schedule import Schedule, build_schedule
from slime.models.common.flops import FlopsModel
from slime.training.step.targets import Arrays, Signals, Targets, compute_targets


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch with all quantities that need all of it. Sequences are by sample position, each entry [R]."""

    batch: TrainBatch
    schedule: Schedule
    masks: Arrays
    """Trained tokens: the loss mask, zero in an unscored sample."""
    weights: Arrays
    """Weight of each response token in the loss of its own step."""
    shares: Arrays
    """Weight of each trained token in a mean over those of its step: diagnostics are such means, however losses add."""
    units: tuple[float, ...]
    """One over the executions of the sample's step (its trained tokens with token_mean): what a reducer's sum lacks."""
    signals: Signals = field(default_factory=Signals)
    """What forward passes said about the tokens."""
    targets: Targets | None = None
    """Advantages and returns; None until `with_signals`."""


def prepare(
    batch: TrainBatch,
    args: Any,
    *,
    dp_size: int,
    cp_size: int = 1,
    micro_batch_multiple: int = 1,
    flops: FlopsModel | None = None,
    one_step: bool = False,
) -> PreparedBatch:
    """Schedule and token weights of a batch. Deterministic; every rank computes the same.

    `one_step` is for measuring: a batch of any size is one step, whatever the settings say. `flops` prices samples for
    `--balance-data`; a micro-batch may hold `--max-tokens-per-gpu` tokens on each of `cp_size` ranks.
    """
    samples = batch.samples
    _check_samples(samples, args)
    executions = [s.index for s in samples]
    dynamic = bool(args.use_dynamic_batch_size)
    num_steps = 1 if one_step else int(args.num_steps_per_rollout) if args.use_dynamic_global_batch_size else None
    schedule = build_schedule(
        [s.num_tokens for s in samples],
        executions,
        dp_size=dp_size,
        global_batch_size=None if num_steps is not None else int(args.global_batch_size),
        num_steps=num_steps,
        micro_batch_size=None if dynamic else int(args.micro_batch_size),
        max_tokens_per_gpu=int(args.max_tokens_per_gpu) * cp_size if dynamic else None,
        balance=bool(args.balance_data),
        cost_S=None if flops is None else [flops.forward(s.num_tokens, num_logits=s.response_length) for s in samples],
        micro_batch_multiple=micro_batch_multiple,
    )
    masks = tuple(s.loss_mask if _is_scored(s) else np.zeros_like(s.loss_mask) for s in samples)
    weights, shares, units = [np.zeros_like(m) for m in masks], [np.zeros_like(m) for m in masks], [0.0] * len(samples)
    for step in schedule.steps:
        # An unscored execution is no evidence: it leaves the denominator, too.
        members = [p for p in step.positions if _is_scored(samples[p])]
        parts = token_weights(
            [masks[p] for p in members],
            [executions[p] for p in members],
            kind=args.loss_aggregation,
            constant_length=args.loss_constant_length,
            count_masked=not args.drop_masked_executions,
        )
        for position, part in zip(members, parts, strict=True):
            weights[position] = np.asarray(part, np.float32)
        if not members:
            raise DataError(f"got an optimizer step of {len(step.positions)} samples and no reward; look at the grader")
        trained, owners = [masks[p] > 0 for p in members], [executions[p] for p in members]
        means = token_weights(trained, owners, kind="token_mean")
        by_token = args.loss_aggregation == "token_mean"
        divisor = max(1, sum(int(m.sum()) for m in trained)) if by_token else len(set(owners))
        for position, mean in zip(members, means, strict=True):
            shares[position] = np.asarray(mean, np.float32)
            units[position] = 1.0 / divisor
    return PreparedBatch(batch, schedule, masks, tuple(weights), tuple(shares), tuple(units))


def with_signals(prepared: PreparedBatch, args: Any, signals: Signals) -> PreparedBatch:
    """The same batch with advantages and returns. Raises `HookError`, `DataError` as `compute_targets` does."""
    targets = compute_targets(prepared.batch, prepared.masks, args, signals)
    return dataclasses.replace(prepared, signals=signals, targets=targets)


def _is_scored(sample: TrainSample) -> bool:
    return not math.isnan(sample.reward)


def _check_samples(samples: Sequence[TrainSample], args: Any) -> None:
    if args.loss_type != "policy_loss":
        return
    for s in samples:
        if math.isinf(s.reward):
            raise DataError(
                f"sample {s.index} of group {s.group_index}: got reward {s.reward}; graders must return numbers"
            )
    if not (args.use_rollout_logprobs or args.use_tis or args.rejection_level or args.get_mismatch_metrics):
        return
    for s in samples:
        lacks = s.loss_mask > 0
        if s.rollout_log_probs is not None:  # elsewhere the corrections leave such tokens alone
            lacks = lacks & (s.token_versions == NOT_SAMPLED) & bool(args.use_rollout_logprobs)
        if lacks.any():
            raise DataError(
                f"sample {s.index}: trained tokens without rollout log-probs, because no engine sampled them; "
                "--use-rollout-logprobs and the off-policy corrections need them"
            )
