"""Training on one batch: forward passes for log-probs, then the optimizer steps.

All parallel layouts use the same code: Megatron's schedules run the micro-batches (plain, 1F1B or interleaved). All
ranks of a pipeline build the same micro-batches in the same order, and each stage waits for the hidden states of the
previous one. Only the last stage has results, identical on all of its tensor- and context-parallel ranks. One of these
ranks (`StepContext.reports`) sends them to all ranks, so metrics, log-probs and errors are the same everywhere.

Invariants
1. The loss is not scaled by the number of micro-batches, tokens or ranks: it already includes its denominators.
2. All ranks run the same number of micro-batches, so that sends and collectives match.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from slime.algorithms.advantages import Arrays
from slime.core.batch import TrainBatch, trains_any
from slime.core.errors import HookError
from slime.data.micro_batch_schedule import StepSchedule
from slime.settings import Args
from slime.training.model.megatron_config import training_dtype
from slime.training.model.policy_model import lent_embedding
from slime.training.parallel import ParallelInfo
from slime.training.step.loss import Evaluation, LossParts, Objective, Sums, nothing_of
from slime.training.step.micro_batch import MicroBatch, PreparedBatch, to_device
from slime.training.step.mismatch import MismatchMeter
from slime.training.step.non_finite import Suspects, dump, names_of, raise_for
from slime.training.step.optimizer import (
    Trainable,
    apply_update,
    before_log_prob,
    before_train_step,
    reduce_grads,
    reset_moments,
    zero_grad,
)
from slime.training.step.staging import Put, Staging

Finish = Callable[[MicroBatch, Any], Tensor]
"""Returns the scalar loss of a micro-batch from the last chunk's output. Called once per micro-batch, in order."""


class OwnTime:
    """Measures the forward and backward passes of a rank before its gradients are summed, when it begins to wait for
    the other replicas. On a GPU, the time is that of the GPU, and measuring does not synchronize with it.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        begin = self._now()
        try:
            yield
        finally:
            self._spans.append((begin, self._now()))

    def take_s(self) -> float:
        """Returns the seconds since the last call. On a GPU, waits for the last pass."""
        spans, self._spans = self._spans, []
        if not self._on_gpu:
            return float(sum(end - begin for begin, end in spans))
        for _, end in spans:
            end.synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in spans)) / 1000

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass(frozen=True, slots=True)
class StepContext:
    args: Args
    device: torch.device
    dp_rank: int
    reports: bool
    """See `ParallelInfo.reports`."""
    pad_to_multiple: int
    """Rows are padded to a multiple of this, so that all ranks that share a row have the same number of tokens."""
    pad_each_to: int
    """Sequences are padded to a multiple of this: context parallelism splits each one into two chunks per rank."""
    staging: Staging | None
    """Copies micro-batches to a GPU, one micro-batch ahead; None on a CPU."""
    own_time: OwnTime | None = None

    @classmethod
    def of(
        cls, args: Args, device: torch.device, info: ParallelInfo, sequence_parallel: bool, staging: Staging | None
    ) -> StepContext:
        sizes = info.sizes
        return cls(
            args,
            device,
            info.dp_rank,
            info.reports,
            pad_to_multiple=sizes.cp * (sizes.tp if sequence_parallel else 1),
            pad_each_to=2 * sizes.cp if sizes.cp > 1 else 1,
            staging=staging,
        )


def micro_batch_multiple(chunks: Sequence[Any]) -> int:
    """Returns a number that must divide every rank's number of micro-batches: the group size of interleaving, or 1."""
    if len(chunks) == 1:
        return 1
    return int(chunks[0].config.microbatch_group_size_per_vp_stage)


def forward_batch(
    context: StepContext, evaluation: Evaluation, chunks: Sequence[Any], prepared: PreparedBatch, *, whose: str = ""
) -> tuple[Arrays, ...]:
    """Returns each result of `evaluation`, [R] float32 for every sample, on every rank. No gradients. Collective.

    The ranks' results are summed. Exactly one rank has each value and the others have zeros, so the sum is exact.
    `whose` is the prefix of the policy in the model; see `before_log_prob`.
    """
    before_log_prob(context.args, chunks, whose)
    lengths = [s.response_length for s in prepared.batch.samples]
    ends = np.cumsum(lengths)
    flat = torch.zeros(evaluation.num_results, int(ends[-1]), dtype=torch.float32, device=context.device)

    def keep(batch: MicroBatch, output: Any) -> Tensor:
        if context.reports:
            for row, result in zip(flat, evaluation.results(output), strict=True):
                for position, part in zip(batch.positions, result.split(batch.lengths), strict=True):
                    row[int(ends[position]) - len(part) : int(ends[position])] = part
        return torch.zeros((), device=context.device)

    for step in prepared.schedule.steps:
        _run_micro_batches(
            chunks,
            _batches(context, prepared, step),
            step.num_micro_batches,
            evaluate=lambda chunk, batch: evaluation.evaluate(chunk, batch, trains=False),
            finish=keep,
            forward_only=True,
        )
    dist.all_reduce(flat)
    return tuple(tuple(np.split(row, ends[:-1])) for row in flat.cpu().numpy())


def mean_loss(log_probs: Arrays, batch: TrainBatch) -> dict[str, float]:
    """Returns the mean loss over a batch's trained tokens, in float64, independent of split, order and packing."""
    trained = [-part[s.loss_mask > 0].astype(np.float64) for part, s in zip(log_probs, batch.samples, strict=True)]
    num_tokens = sum(map(len, trained))
    return {"loss": math.fsum(float(part.sum()) for part in trained) / num_tokens, "num_tokens": float(num_tokens)}


def measure_mismatch(
    context: StepContext, evaluation: Evaluation, chunks: Sequence[Any], prepared: PreparedBatch, *, version: int
) -> dict[str, float]:
    """Measures the train-inference mismatch of a batch under the current weights, without training.

    Uses the batch's log-probs if it has any, otherwise runs a forward pass. See `MismatchMeter`.
    """
    old = prepared.log_probs.student
    log_probs = forward_batch(context, evaluation, chunks, prepared)[-1] if old is None else old
    return _mismatch_of(context, prepared, log_probs, version)


def _meter(context: StepContext, version: int) -> MismatchMeter:
    """Returns a meter, with `mixes_versions` set if newer tokens can depend on results of older versions."""
    mixes = context.args.pause_generation_mode == "in_place" or context.args.use_rollout_routing_replay
    return MismatchMeter(version, context.device, mixes_versions=mixes)


def _mismatch_of(context: StepContext, prepared: PreparedBatch, log_probs: Arrays, version: int) -> dict[str, float]:
    meter = _meter(context, version)
    prepared = dataclasses.replace(prepared, routing=None, images=None)  # not needed without a forward pass
    for step in prepared.schedule.steps if context.reports else ():
        for batch in _batches(context, prepared, step):
            own = [log_probs[p] for p in batch.positions]
            meter.add(batch, torch.from_numpy(np.concatenate(own or [np.zeros(0, np.float32)])).to(context.device))
    return _finish_mismatch(context, meter, prepared)


def train_on(
    context: StepContext, objective: Objective, trainable: Trainable, prepared: PreparedBatch, *, version: int
) -> dict[str, float]:
    """Runs all optimizer steps for the batch and returns metrics averaged over the steps.

    A batch without old log-probs has one step, whose forward pass computes them. A step without a trained token is
    skipped: it changes neither weights nor optimizer state. If a loss or gradient is not finite, or if the mismatch
    exceeds the limit, raises `NumericsError` on all ranks before the step changes the weights.
    """
    results = []
    first_mismatch = {}
    if context.args.reset_optimizer_states:
        reset_moments(trainable)
    compares, old = objective.compares_with_engines, prepared.log_probs.student
    meter = _meter(context, version) if compares and old is None else None
    if compares and old is not None:
        first_mismatch = _mismatch_of(context, prepared, old, version)
    for number, step in enumerate(prepared.schedule.steps):
        if not trains_any(prepared.batch.samples[position] for position in step.positions):
            continue
        zero_grad(trainable)
        before_train_step(context.args, prepared.batch.rollout_id, number, trainable)
        metrics = run_step(context, objective, trainable, prepared, step, meter)
        if meter is not None:
            first_mismatch = _finish_mismatch(context, meter, prepared)
        metrics.update(apply_update(trainable))
        results.append(metrics)
    zero_grad(trainable)
    return {**_average(results), **first_mismatch, "train/num_updates": float(len(results))}


def rehearse_step(context: StepContext, objective: Objective, trainable: Trainable, prepared: PreparedBatch) -> None:
    """Runs the forward and backward passes of a batch's first step with a zero loss. Collective.

    Gradients are zero before and after.
    """
    (step, *_) = prepared.schedule.steps
    zero_grad(trainable)
    _run_micro_batches(
        trainable.ddps,
        _batches(context, prepared, step),
        step.num_micro_batches,
        evaluate=lambda chunk, batch: objective.evaluate(chunk, batch, trains=True),
        finish=lambda _, output: nothing_of(objective, output),
        lends=True,
    )
    reduce_grads(trainable)
    zero_grad(trainable)


@dataclass(slots=True)
class _Collected:
    sums: Sums = field(default_factory=dict)
    suspects: Suspects = field(default_factory=Suspects)
    failure: Exception | None = None
    """An error in a user's function. It is raised after all ranks have run their collectives, to avoid a deadlock."""

    def add(self, batch: MicroBatch, scores: Tensor, parts: LossParts) -> None:
        self.suspects.add(batch, scores, parts.token_loss)
        for name, value in parts.sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value.double()


def run_step(
    context: StepContext,
    objective: Objective,
    trainable: Trainable,
    prepared: PreparedBatch,
    step: StepSchedule,
    meter: MismatchMeter | None,
) -> dict[str, float]:
    """Runs the passes of one optimizer step and sums gradients. Returns the step's metrics, identical on every rank."""
    seen = _Collected()

    def finish(batch: MicroBatch, output: Any) -> Tensor:
        try:
            parts = objective.loss(batch, output)
        except Exception as error:
            seen.failure = seen.failure or error
            return nothing_of(objective, output)
        if context.reports:
            scores = [x.detach() for x in objective.results(output)]
            seen.add(batch, scores[0], parts)
            if meter is not None:
                meter.add(batch, scores[-1])
        return parts.loss

    with context.own_time.measured() if context.own_time is not None else nullcontext():
        _run_micro_batches(
            trainable.ddps,
            _batches(context, prepared, step),
            step.num_micro_batches,
            evaluate=lambda chunk, batch: objective.evaluate(chunk, batch, trains=True),
            finish=finish,
            lends=True,
        )
    reduce_grads(trainable)  # even after an error: reductions that overlap the backward pass have already started
    return _share(context, prepared, seen)


def _run_micro_batches(
    chunks: Sequence[Any],
    batches: Generator[MicroBatch],
    num_micro_batches: int,
    *,
    evaluate: Callable[[Any, MicroBatch], Any],
    finish: Finish,
    forward_only: bool = False,
    lends: bool = False,
) -> None:
    """Runs the forward passes and, unless `forward_only`, the backward passes of a step's micro-batches. Collective.

    `chunks` are this rank's model chunks, wrapped in Megatron's DDP. `evaluate(chunk, micro_batch)` returns the output
    of one chunk. With `lends`, the last stage gets a copy of the first stage's embedding for multi-token prediction.
    Gradients accumulate in DDP's buffers; a later `reduce_grads` sums them over ranks.
    """

    def forward_step(iterator: Iterator[MicroBatch], chunk: Any) -> tuple[Any, Callable[[Any], Any]]:
        batch = next(iterator)

        def loss_of(output: Any) -> tuple[Tensor, Tensor, None]:
            # With `calculate_per_token_loss`, Megatron does not divide a loss that is returned in this form.
            return finish(batch, output), torch.zeros((), dtype=torch.int), None

        return evaluate(chunk, batch), loss_of

    embedding = lent_embedding(chunks) if lends else nullcontext()
    with closing(batches), embedding, torch.set_grad_enabled(not forward_only):
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=list(itertools.tee(batches, len(chunks))),
            model=list(chunks),
            num_microbatches=num_micro_batches,
            seq_length=1,  # stages exchange the actual shapes, because rows differ in length
            micro_batch_size=1,
            forward_only=forward_only,
        )


def _batches(context: StepContext, prepared: PreparedBatch, step: StepSchedule) -> Generator[MicroBatch]:
    """Yields this rank's micro-batches for a step, built on demand or one ahead (`StepContext.staging`)."""

    def build(positions: Sequence[int], put: Put | None = None) -> MicroBatch:
        return to_device(
            prepared,
            positions,
            context.device,
            pad_to_multiple=context.pad_to_multiple,
            pad_each_to=context.pad_each_to,
            put=put,
        )

    own = step.micro_batches[context.dp_rank]
    if context.staging is None:
        yield from map(build, own)
    else:
        yield from context.staging.one_ahead([functools.partial(build, positions) for positions in own])


def _finish_mismatch(context: StepContext, meter: MismatchMeter, prepared: PreparedBatch) -> dict[str, float]:
    # Reduce over the world, so that all ranks raise together. Ranks that do not report contribute nothing.
    args, world = context.args, dist.group.WORLD
    assert world is not None, "the trainer has not joined its process group"
    return meter.finish(prepared.batch, dtype=training_dtype(args.megatron), limit=args.mismatch_limit, group=world)


def _share(context: StepContext, prepared: PreparedBatch, seen: _Collected) -> dict[str, float]:
    """Sums metrics over all ranks.

    If the loss is not finite on any rank, raises `NumericsError` on every rank, with the samples of all ranks. An error
    in a user's function becomes a `HookError` on the other ranks.
    """
    suspect = seen.suspects.any_found()
    flag = [] if suspect is None else [suspect.double()]
    sums = [] if seen.failure else list(seen.sums.values())
    values = torch.stack([*flag, *sums]).tolist() if flag or sums else []  # one copy
    is_bad = bool(flag) and bool(values.pop(0))
    bad = seen.suspects.offsets() if is_bad else {}
    folder = dump(prepared, bad, seen.suspects, run_dir=context.args.run_dir)
    reports: list[Any] = [None] * dist.get_world_size()
    failed = None if seen.failure is None else repr(seen.failure)
    own = (dict(zip(seen.sums, values, strict=False)), names_of(prepared, bad), folder, failed)
    dist.all_gather_object(reports, own)
    if seen.failure is not None:
        raise seen.failure
    for rank, (*_, failed) in enumerate(reports):
        if failed is not None:
            raise HookError(f"the loss function on training rank {rank} raised {failed}")
    raise_for([name for _, part, _, _ in reports for name in part], [folder for _, _, folder, _ in reports])
    every = dict.fromkeys(name for sums, *_ in reports for name in sums)
    return {f"train/{name}": math.fsum(sums.get(name, 0.0) for sums, *_ in reports) for name in sorted(every)}


def _average(results: Sequence[dict[str, float]]) -> dict[str, float]:
    """Averages each metric over optimizer steps. Counts are summed instead."""
    out: dict[str, float] = {}
    for name in dict.fromkeys(k for r in results for k in r):
        values = [r[name] for r in results if name in r]
        counted = name.endswith("_clamped") or name == "train/skipped_updates"
        out[name] = sum(values) if counted else sum(values) / len(values)
    return out
