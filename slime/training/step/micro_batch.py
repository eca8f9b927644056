"""Converts a train batch to the tensors of one forward pass and its loss.

On the host, `prepare` computes the schedule and the divisors of token weights in the loss of their step, identically on
every rank. Forward passes then compute log-probs, which every rank receives for all tokens, and `with_advantages` adds
advantages and returns (`slime.algorithms.whole_batch`). `to_device` only selects, packs and copies, so results cannot
depend on the partition.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slime.algorithms import Algorithm
from slime.algorithms.advantages import Arrays
from slime.algorithms.advantages.returns import ALONE, Together
from slime.algorithms.token_losses import Sequences
from slime.algorithms.whole_batch import (
    AdvantagesAndReturns,
    BatchLogProbs,
    TokenWeights,
    advantages_and_returns,
    check_samples,
    step_weights,
)
from slime.core.batch import TrainBatch
from slime.core.sample import NOT_SAMPLED
from slime.data.micro_batch_schedule import Schedule, build_schedule
from slime.data.packing import PackedBatch, pack
from slime.data.shared_prefixes import Prefixes, Shared
from slime.models.common.flops import FlopsModel
from slime.models.common.packed_attention import PackedSequences
from slime.settings import Args
from slime.training.model.row_shards import ASKED, RowPlan
from slime.training.step.routing import BatchRouting
from slime.training.step.staging import Put, put_each
from slime.training.step.vision_encoder import Sight


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch with all values that depend on the entire batch. Arrays are indexed by sample position; each is [R]."""

    batch: TrainBatch
    schedule: Schedule
    weights: tuple[TokenWeights, ...]
    """Weight of each response token in the loss of its step; zero where masked."""
    token_shares: tuple[float, ...]
    """`StepWeights.token_share` of each sample's step."""
    units: tuple[float, ...]
    """`StepWeights.unit` of each sample's step; 0 for unscored samples."""
    log_probs: BatchLogProbs = field(default_factory=BatchLogProbs)
    values: Arrays | None = None
    """The critic's values before its update; None without a critic."""
    aims: AdvantagesAndReturns | None = None
    routing: BatchRouting | None = None
    """Expert choices for the routers to replay or record; None if they do neither."""
    images: Sight | None = None
    """Encodes the samples' images; None without images."""
    shared: Mapping[tuple[int, ...], tuple[Shared, ...]] | None = None
    """A micro-batch's sample positions -> what each sample shares with an earlier one; None if nothing is shared."""
    splits_heads: bool = False
    """Whether context-parallel ranks split heads (`--cp-comm-type a2a`)."""

    @property
    def shared_fraction(self) -> float:
        """Fraction of the batch's tokens that are not computed, because another sample in the row shares them."""
        if self.shared is None:
            return 0.0
        shared = sum(one.num_tokens for row in self.shared.values() for one in row)
        return shared / sum(s.num_tokens for s in self.batch.samples)


def prepare(
    batch: TrainBatch,
    args: Args,
    algorithm: Algorithm,
    *,
    dp_size: int,
    cp_size: int = 1,
    splits_heads: bool = False,
    micro_batch_multiple: int = 1,
    flops: FlopsModel | None = None,
    one_step: bool = False,
) -> PreparedBatch:
    """Computes a batch's schedule and token weights. Deterministic and identical on every rank.

    `one_step` is for measurements: a batch of any size becomes a single step, whatever the settings. `flops` is the
    cost model for `--balance-data`. A micro-batch can have `--max-tokens-per-gpu` tokens on each of `cp_size` ranks.
    `splits_heads`: context-parallel ranks split heads (`--cp-comm-type a2a`).
    """
    samples = batch.samples
    check_samples(samples, args, algorithm)
    room = args.max_tokens_per_gpu if args.use_dynamic_batch_size else None
    assert room is not None or not args.use_dynamic_batch_size, "the settings derive max_tokens_per_gpu"
    num_steps = 1 if one_step else args.num_steps_per_rollout if args.use_dynamic_global_batch_size else None
    prefixes = Prefixes.of(samples, replays=args.use_rollout_routing_replay) if args.use_prefix_sharing else None
    schedule = build_schedule(
        [s.num_tokens for s in samples],
        batch.executions,
        dp_size=dp_size,
        global_batch_size=None if num_steps is not None else args.global_batch_size,
        num_steps=num_steps,
        micro_batch_size=args.micro_batch_size if room is None else None,
        max_tokens_per_gpu=room,
        cp_size=cp_size,
        splits_heads=splits_heads,
        balance=args.balance_data,
        cost_S=None if flops is None else [flops.forward(s.num_tokens, num_logits=s.response_length) for s in samples],
        micro_batch_multiple=micro_batch_multiple,
        prefixes=prefixes,
        prefix_cost=float if flops is None else functools.partial(flops.forward, num_logits=0),
    )
    weights: dict[int, TokenWeights] = {}
    shares, units = [0.0] * len(samples), [0.0] * len(samples)
    count_masked = not args.drop_masked_executions
    for step in schedule.steps:
        own = step_weights(batch, step.positions, algorithm.aggregation, count_masked=count_masked)
        for position, part in own.weights.items():
            weights[position], shares[position], units[position] = part, own.token_share, own.unit
    rows = [row for step in schedule.steps for rank in step.micro_batches for row in rank]
    shared = None if prefixes is None else {row: prefixes.of_row(row) for row in rows}
    every = tuple(weights.get(p, TokenWeights(s.loss_mask, 0.0)) for p, s in enumerate(samples))
    return PreparedBatch(batch, schedule, every, tuple(shares), tuple(units), shared=shared, splits_heads=splits_heads)


def with_advantages(
    prepared: PreparedBatch,
    args: Args,
    algorithm: Algorithm,
    log_probs: BatchLogProbs,
    values: Arrays | None = None,
    together: Together = ALONE,
) -> PreparedBatch:
    """Adds advantages and returns to the batch. Raises the errors of `advantages_and_returns`. Collective over
    `together`."""
    aims = advantages_and_returns(prepared.batch, args, algorithm, log_probs, values, together)
    return dataclasses.replace(prepared, log_probs=log_probs, values=values, aims=aims)


@dataclass(frozen=True, slots=True)
class Places:
    """Which samples the response tokens of a micro-batch belong to. Small enough to keep until the step ends."""

    positions: tuple[int, ...]
    """Positions of the samples in the batch, in packing order."""
    lengths: tuple[int, ...]
    """Number of response tokens of each sample; R is their sum."""

    def of_token(self, index: int) -> tuple[int, int]:
        """Returns (position of the sample in the batch, offset in its response) of entry `index` in an [R] tensor."""
        for position, length in zip(self.positions, self.lengths, strict=True):
            if index < length:
                return position, index
            index -= length
        raise AssertionError(f"the micro-batch has no response token {index}")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The tensors of one forward pass, on the device. R is the total number of response tokens of its samples."""

    positions: tuple[int, ...]
    """Positions of the samples in the batch, in packing order; empty for a dummy micro-batch."""
    lengths: tuple[int, ...]
    total_lengths: tuple[int, ...]
    """Number of tokens of each sample, including the prompt."""
    tokens: Tensor
    """[T] int64"""
    position_ids: Tensor
    """[T] int64"""
    packed: PackedSequences
    predicting: Tensor
    """[R] int64: index in [0, T) of the hidden state that predicts each response token."""
    target_tokens: Tensor
    """[R] int64: response tokens, sample by sample."""
    asked_positions: Tensor
    """[U] int64: row positions to score. A position that several samples share appears once."""
    asked_tokens: Tensor
    """[U] int64: the token to score at each of these positions."""
    answers: Tensor | None
    """[R] int64: index in [0, U) of each response token; None if U equals R and the order is the same."""
    sequences: Sequences
    """The sample that each response token belongs to."""
    mask: Tensor
    """[R] float32: 1 for trained tokens, else 0."""
    weights: Tensor
    """[R] float32: weight in the loss of the step; zero where masked."""
    token_share: float
    """Weight of a trained token in a mean over the step's trained tokens."""
    unit: float
    """Scale for the result of a user's reducer; see `StepWeights.unit`."""
    rollout_log_probs: Tensor
    """[R] float32; undefined where `sampled` is 0."""
    sampled: Tensor
    """[R] float32: 1 if the token is trained and an engine reported its log-prob, else 0."""
    versions: Tensor
    """[R] int32: weight version of each token."""
    advantages: Tensor
    """[R] float32; zero until they are computed."""
    old_log_probs: Tensor | None
    """[R] float32, under the policy before the update; None if the training pass computes them."""
    old_full_log_probs: Tensor | None
    """[R] float32: `old_log_probs` without top-k and top-p; only if tokens were sampled from a top-p set."""
    ref_log_probs: Tensor | None
    """[R] float32"""
    old_values: Tensor | None
    """[R] float32: the critic's values before its update."""
    returns: Tensor | None
    """[R] float32: the values that the critic learns to predict."""

    @property
    def places(self) -> Places:
        return Places(self.positions, self.lengths)


def to_device(
    prepared: PreparedBatch,
    positions: Sequence[int],
    device: torch.device,
    *,
    pad_to_multiple: int = 1,
    pad_each_to: int = 1,
    put: Put | None = None,
) -> MicroBatch:
    """Packs the samples at `positions` and copies their tensors to the device. Padding works as in `pack`.

    `put` combines all arrays into a single copy to the device (`slime.training.step.staging`). Without it, each array
    is copied separately.
    """
    samples = [prepared.batch.samples[p] for p in positions]
    shared = None if prepared.shared is None or not positions else prepared.shared[tuple(positions)]
    row = pack(samples, pad_to_multiple=pad_to_multiple, pad_each_to=pad_each_to, shared=shared)
    own = _of_row(row)
    plan = _plan_of(row, own[ASKED], splits_heads=prepared.splits_heads)
    lengths = tuple(s.response_length for s in samples)
    pictures = None if prepared.images is None else prepared.images.row(samples, row, plan.arrays["row/positions"])
    arrays = {**own, **_of_tokens(prepared, positions), **plan.arrays, **({} if pictures is None else pictures.arrays)}
    tensors = (put or put_each(device))(arrays)
    predicting, target_tokens = _of_each(tensors)
    packed = plan.packed(tensors)
    packed.images = None if pictures is None else pictures.on_device(tensors)
    if prepared.routing is not None:
        packed.routing = prepared.routing.row(positions, row, packed.shard, device)
    return MicroBatch(
        positions=tuple(positions),
        lengths=lengths,
        total_lengths=tuple(s.num_tokens for s in samples),
        tokens=tensors["tokens"],
        position_ids=tensors["position_ids"],
        packed=packed,
        predicting=predicting,
        target_tokens=target_tokens,
        asked_positions=tensors[ASKED],
        asked_tokens=tensors["asked_tokens"],
        answers=tensors.get("answers"),
        sequences=Sequences(tensors["sequences"], len(samples)),
        mask=tensors["mask"],
        weights=tensors["weights"],
        token_share=max((prepared.token_shares[p] for p in positions), default=0.0),
        unit=max((prepared.units[p] for p in positions), default=0.0),
        rollout_log_probs=tensors["rollout_log_probs"],
        sampled=tensors["sampled"],
        versions=tensors["versions"],
        advantages=tensors["advantages"],
        old_log_probs=tensors.get("old_log_probs"),
        old_full_log_probs=tensors.get("old_full_log_probs"),
        ref_log_probs=tensors.get("ref_log_probs"),
        old_values=tensors.get("old_values"),
        returns=tensors.get("returns"),
    )


def _plan_of(row: PackedBatch, asked: npt.NDArray[np.int64], *, splits_heads: bool) -> RowPlan:
    return RowPlan.of(
        row.cu_seqlens, max_seqlen=row.max_seqlen, asked=asked, prefixes=row.prefixes, splits_heads=splits_heads
    )


def _of_row(row: PackedBatch) -> dict[str, npt.NDArray[Any]]:
    """Returns the row's fields of `MicroBatch`: tokens, positions to score, and `answers` if U does not equal R."""
    asked_positions, asked_tokens, answers = row.log_prob_requests()
    found = {} if answers is None else {"answers": answers}
    tokens = {"tokens": row.tokens, "position_ids": row.position_ids}
    return {**tokens, ASKED: asked_positions, "asked_tokens": asked_tokens, **found}


def _of_each(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns `predicting` and `target_tokens` [R], expanded from the scored positions and tokens [U]."""
    asked, answers = (tensors[ASKED], tensors["asked_tokens"]), tensors.get("answers")
    return asked if answers is None else (asked[0].index_select(0, answers), asked[1].index_select(0, answers))


def _of_tokens(prepared: PreparedBatch, positions: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
    """Returns the [R] fields of `MicroBatch` that are known so far. Advantages are zero until they are computed."""
    samples = [prepared.batch.samples[p] for p in positions]
    mask = _join([s.loss_mask for s in samples], np.float32)
    versions = _join([s.token_versions for s in samples], np.int32)
    rollout = [
        np.zeros(s.response_length, np.float32) if s.rollout_log_probs is None else s.rollout_log_probs for s in samples
    ]
    has_log_prob = [np.full(s.response_length, s.rollout_log_probs is not None) for s in samples]
    sampled = (mask > 0) & (versions != NOT_SAMPLED) & _join(has_log_prob, np.bool_)
    log_probs, aims = prepared.log_probs, prepared.aims
    known: dict[str, Arrays | None] = {
        "advantages": aims.advantages if aims is not None else None,
        "old_log_probs": log_probs.old,
        "old_full_log_probs": log_probs.old_full,
        "ref_log_probs": log_probs.ref,
        "old_values": prepared.values,
        "returns": aims.returns if aims is not None else None,
    }
    return {
        "sequences": np.repeat(np.arange(len(samples)), [s.response_length for s in samples]),
        "mask": mask,
        "weights": _join([prepared.weights[p].array() for p in positions], np.float32),
        "rollout_log_probs": _join(rollout, np.float32),
        "sampled": sampled.astype(np.float32),
        "versions": versions,
        "advantages": np.zeros(len(mask), np.float32),  # until they are computed
        **{
            name: _join([arrays[p] for p in positions], np.float32)
            for name, arrays in known.items()
            if arrays is not None
        },
    }


def _join(parts: Sequence[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate([np.asarray(p, dtype) for p in parts]) if parts else np.zeros(0, dtype)
