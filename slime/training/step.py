"""Training on one batch: forward passes for old and reference log-probs, then the optimizer steps.

The loop is our own (one pipeline stage). Every rank runs the same number of micro-batches, so collectives match.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.core.errors import NumericsError
from slime.training.gap import GapMeter, locate
from slime.training.loss import Sums, micro_batch_loss
from slime.training.micro_batch import MicroBatch, PreparedBatch, to_device
from slime.training.optimizer import Trainable, apply_update, gather_grads, reduce_grads, zero_grad

Positions = Sequence[int]
LogProbs = dict[int, Tensor]
"""Sample position -> float32 [R] on the device."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """What the steps of one run have in common."""

    args: Any
    device: torch.device
    dtype: torch.dtype
    dp_rank: int
    dp_group: dist.ProcessGroup
    pad_to_multiple: int
    """Rows are padded to it: the tensor-parallel size under sequence parallelism."""


def forward_log_probs(context: StepContext, model: Any, prepared: PreparedBatch) -> LogProbs:
    """Log-probs under the model's current weights of all samples of this data-parallel rank, without gradients."""
    out: LogProbs = {}
    with torch.no_grad():
        for step in prepared.schedule.steps:
            for positions in step.micro_batches[context.dp_rank]:
                batch = to_device(prepared, positions, context.device, pad_to_multiple=context.pad_to_multiple)
                log_probs, _ = _evaluate(context, model, batch, with_entropy=False)
                out.update(zip(batch.positions, log_probs.split(batch.lengths), strict=True))
    return out


def measure_gap(context: StepContext, model: Any, prepared: PreparedBatch, *, version: int) -> dict[str, float]:
    """The log-prob gap of a batch under the model's current weights; nothing is trained. See `GapMeter.finish`."""
    return _gap_of(context, prepared, forward_log_probs(context, model, prepared), version)


def _gap_of(context: StepContext, prepared: PreparedBatch, log_probs: LogProbs, version: int) -> dict[str, float]:
    meter = GapMeter(version, context.device)
    for batch in _own_batches(context, prepared):
        meter.add(batch, _gather(log_probs, batch, context.device))
    return _finish_gap(context, meter, prepared)


def train_on(
    context: StepContext,
    trainable: Trainable,
    prepared: PreparedBatch,
    *,
    old: LogProbs | None,
    ref: LogProbs | None,
    version: int,
) -> dict[str, float]:
    """Runs every optimizer step of the batch; returns metrics averaged over them.

    `old`: log-probs under the weights before the first step, or None if there is only one step, whose own forward pass
    gives them. Raises `NumericsError` on all ranks, before the weights change, for a non-finite loss or gradient and
    for a log-prob gap over its limit.
    """
    results = []
    first_gap = {}
    is_policy = context.args.loss_type == "policy_loss"
    meter = GapMeter(version, context.device) if is_policy and old is None else None
    if is_policy and old is not None:
        first_gap = _gap_of(context, prepared, old, version)
    for step in prepared.schedule.steps:
        zero_grad(trainable)
        sums = _run_micro_batches(context, trainable, prepared, step.micro_batches[context.dp_rank], old, ref, meter)
        reduce_grads(trainable)
        metrics = _reduce_sums(context, sums)
        if meter is not None:
            first_gap = _finish_gap(context, meter, prepared)
        metrics.update(apply_update(trainable))
        results.append(metrics)
    zero_grad(trainable)
    return {**_average(results), **first_gap, "train/num_updates": float(len(results))}


def first_step_gradients(context: StepContext, trainable: Trainable, prepared: PreparedBatch) -> dict[str, Tensor]:
    """Megatron name -> gradient [shard shape] float32 of the first optimizer step, summed over all ranks; nothing
    changes.

    For checks: a training step leaves each data-parallel rank with its own shard of the gradients only.
    """
    zero_grad(trainable)
    _run_micro_batches(
        context, trainable, prepared, prepared.schedule.steps[0].micro_batches[context.dp_rank], None, None, None
    )
    reduce_grads(trainable)
    gather_grads(trainable)
    out = {name: p.main_grad.detach().clone() for name, p in trainable.model.named_parameters()}
    zero_grad(trainable)
    return out


def _run_micro_batches(
    context: StepContext,
    trainable: Trainable,
    prepared: PreparedBatch,
    mine: Sequence[Positions],
    old: LogProbs | None,
    ref: LogProbs | None,
    meter: GapMeter | None,
) -> Sums:
    """Forward and backward over this rank's micro-batches of one step; returns its metric sums."""
    total: Sums = {}
    suspects: list[tuple[MicroBatch, Tensor]] = []
    for i, positions in enumerate(mine):
        batch = to_device(prepared, positions, context.device, pad_to_multiple=context.pad_to_multiple)
        last = i == len(mine) - 1
        with contextlib.nullcontext() if last else trainable.ddp.no_sync():
            log_probs, entropy = _evaluate(
                context, trainable.ddp, batch, with_entropy=context.args.loss_type == "policy_loss"
            )
            loss, token_loss, sums = micro_batch_loss(
                context.args,
                batch,
                log_probs,
                entropy,
                old_log_probs=None if old is None else _gather(old, batch, context.device),
                ref_log_probs=None if ref is None else _gather(ref, batch, context.device),
            )
            trainable.optimizer.scale_loss(loss).backward()
        if meter is not None:
            meter.add(batch, log_probs.detach())
        suspects.append((batch, ~torch.isfinite(token_loss)))
        for name, value in sums.items():
            total[name] = total[name] + value if name in total else value.double()
    _raise_if_not_finite(context, prepared, suspects)
    return total


def _evaluate(
    context: StepContext, model: Any, batch: MicroBatch, *, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    log_probs, entropy = model(
        batch.tokens,
        batch.position_ids,
        batch.packed,
        batch.predicting,
        batch.targets,
        temperature=float(context.args.rollout_temperature) if context.args.loss_type == "policy_loss" else 1.0,
        with_entropy=with_entropy,
        entropy_grad=with_entropy and bool(context.args.entropy_coef),
        chunk_tokens=int(context.args.log_probs_chunk_size),
    )
    return log_probs, entropy


def _own_batches(context: StepContext, prepared: PreparedBatch) -> Iterator[MicroBatch]:
    for step in prepared.schedule.steps:
        for positions in step.micro_batches[context.dp_rank]:
            yield to_device(prepared, positions, context.device, pad_to_multiple=context.pad_to_multiple)


def _gather(log_probs: LogProbs, batch: MicroBatch, device: torch.device) -> Tensor:
    parts = [log_probs[p] for p in batch.positions]
    return torch.cat(parts) if parts else torch.zeros(0, device=device)


def _finish_gap(context: StepContext, meter: GapMeter, prepared: PreparedBatch) -> dict[str, float]:
    limit = context.args.logprob_gap_limit
    return meter.finish(prepared.batch, dtype=context.dtype, limit=limit, group=context.dp_group)


def _raise_if_not_finite(
    context: StepContext, prepared: PreparedBatch, suspects: Sequence[tuple[MicroBatch, Tensor]]
) -> None:
    """All ranks raise together, naming the samples of every rank."""
    flags = [bad.any() for _, bad in suspects]
    found = torch.stack(flags).any().float() if flags else torch.zeros((), device=context.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=context.dp_group)
    if not bool(found):
        return
    own = []
    for batch, bad in suspects:
        first = dict(reversed([locate(batch, index) for index in torch.nonzero(bad).flatten().tolist()]))
        for position, offset in sorted(first.items()):
            sample = prepared.batch.samples[position]
            own.append(f"sample {sample.index} of group {sample.group_index} from response token {offset} on")
    gathered: list[Any] = [None] * context.dp_group.size()
    dist.all_gather_object(gathered, own, group=context.dp_group)
    names = [name for part in gathered for name in part]
    raise NumericsError(
        f"got a non-finite loss in {len(names)} samples: {'; '.join(names[:8])}; because a log-prob, old log-prob or "
        "advantage there is not finite; the weights are unchanged; look at these samples"
    )


def _reduce_sums(context: StepContext, sums: Sums) -> dict[str, float]:
    """Sums over the data-parallel ranks, in one all-reduce. Every rank has the same names: they depend on
    settings only.
    """
    names = sorted(sums)
    values = torch.stack([sums[n].double() for n in names])
    dist.all_reduce(values, group=context.dp_group)
    return {f"train/{name}": float(value) for name, value in zip(names, values.tolist(), strict=True)}


def _average(results: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean over optimizer steps of each metric; counts are summed."""
    out: dict[str, float] = {}
    for name in dict.fromkeys(k for r in results for k in r):
        values = [r[name] for r in results if name in r]
        counted = name in ("train/log_ratio_clamped", "train/skipped_updates")
        out[name] = sum(values) if counted else sum(values) / len(values)
    return out
