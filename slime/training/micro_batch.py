"""From the whole batch to the tensors of one forward pass.

Everything that depends on more than one micro-batch (advantages, token weights, the schedule) is computed here, on the
host, from the whole batch, by every rank alike. What is cut afterwards only carries numbers along, so no result can
depend on the cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slime.algorithms.advantages import group_advantages, whiten
from slime.algorithms.aggregation import token_weights
from slime.core.batch import TrainBatch, TrainSample
from slime.core.errors import ConfigError, DataError
from slime.core.sample import NOT_SAMPLED
from slime.data.packing import pack
from slime.data.schedule import Schedule, build_schedule
from slime.training.layers import PackedSequences

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch with all quantities that need all of it. Lists are by sample position."""

    batch: TrainBatch
    schedule: Schedule
    advantages_S: npt.NDArray[np.float64]
    weights: tuple[FloatArray, ...]
    """[R] per sample: weight of each response token in the loss of its own step."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The tensors of one forward pass on the device; R is the number of response tokens of all its samples."""

    positions: tuple[int, ...]
    """Positions in the batch of its samples, in packing order; empty for a dummy."""
    lengths: tuple[int, ...]
    """Response tokens of each sample."""
    tokens: Tensor
    """[T] int64"""
    position_ids: Tensor
    """[T] int64"""
    packed: PackedSequences
    predicting: Tensor
    """[R] int64 index in [0, T) whose hidden state predicts the response token."""
    targets: Tensor
    """[R] int64"""
    mask: Tensor
    """[R] float32"""
    weights: Tensor
    """[R] float32, zero where masked."""
    advantages: Tensor
    """[R] float32"""
    rollout_log_probs: Tensor
    """[R] float32; meaningless where `sampled` is 0."""
    sampled: Tensor
    """[R] float32: 1 where an engine's log-prob is there and the token is trained."""
    versions: Tensor
    """[R] int32 weight version of each token."""


def prepare(batch: TrainBatch, args: Any, *, dp_size: int, one_step: bool = False) -> PreparedBatch:
    """Schedule, advantages and token weights of a batch. Deterministic; every rank computes the same.

    `one_step` is for measuring: a batch of any size is one step, whatever `args.global_batch_size` says.
    """
    samples = batch.samples
    _check_samples(samples, args)
    executions = [s.index for s in samples]
    schedule = build_schedule(
        [s.num_tokens for s in samples],
        executions,
        dp_size=dp_size,
        global_batch_size=max(1, len(set(executions))) if one_step else int(args.global_batch_size),
        micro_batch_size=None if args.use_dynamic_batch_size else int(args.micro_batch_size),
        max_tokens_per_gpu=args.max_tokens_per_gpu if args.use_dynamic_batch_size else None,
        balance=bool(args.balance_data),
    )
    weights: list[FloatArray] = [np.zeros(0, np.float32)] * len(samples)
    for step in schedule.steps:
        members = step.positions
        parts = token_weights(
            [samples[p].loss_mask for p in members],
            [executions[p] for p in members],
            per_token=bool(args.calculate_per_token_loss),
        )
        for position, part in zip(members, parts, strict=True):
            weights[position] = part
    return PreparedBatch(batch, schedule, _advantages(samples, args), tuple(weights))


def _check_samples(samples: Sequence[TrainSample], args: Any) -> None:
    if args.loss_type != "policy_loss":
        return
    for s in samples:
        if not math.isfinite(s.reward):
            raise DataError(
                f"sample {s.index} of group {s.group_index}: got reward {s.reward}; graders must return numbers"
            )
    if not (args.use_rollout_logprobs or args.use_tis):
        return
    for s in samples:
        if s.rollout_log_probs is None and (s.loss_mask > 0).any():
            raise DataError(
                f"sample {s.index}: trained tokens without rollout log-probs, because no engine sampled them; "
                "--use-rollout-logprobs and --use-tis need them"
            )


def _advantages(samples: Sequence[TrainSample], args: Any) -> npt.NDArray[np.float64]:
    rewards = np.asarray([s.reward for s in samples], np.float64)
    if args.loss_type != "policy_loss" or not args.compute_advantages_and_returns:
        return np.zeros_like(rewards)
    if args.kl_coef:
        raise ConfigError(
            f"got --kl-coef {args.kl_coef}, because {args.advantage_estimator} does not put KL in rewards; use "
            f"--use-kl-loss"
        )
    if args.rewards_normalization:
        by_std = args.advantage_estimator == "grpo" and bool(args.grpo_std_normalization)
        rewards = group_advantages(
            rewards.tolist(), [s.group_index for s in samples], [s.index for s in samples], normalize_std=by_std
        )
    if args.normalize_advantages:
        rewards = whiten(rewards, [int((s.loss_mask > 0).sum()) for s in samples])
    return rewards


def to_device(
    prepared: PreparedBatch, positions: Sequence[int], device: torch.device, *, pad_to_multiple: int = 1
) -> MicroBatch:
    """Packs the samples at `positions` and puts their tensors on the device."""
    samples = [prepared.batch.samples[p] for p in positions]
    row = pack(samples, pad_to_multiple=pad_to_multiple)
    mask = _join([s.loss_mask for s in samples], np.float32)
    versions = _join([s.token_versions for s in samples], np.int32)
    missing = np.zeros(0, np.float32)
    rollout = [
        np.zeros(s.response_length, np.float32) if s.rollout_log_probs is None else s.rollout_log_probs for s in samples
    ]
    has_log_prob = [np.full(s.response_length, s.rollout_log_probs is not None) for s in samples]
    sampled = (mask > 0) & (versions != NOT_SAMPLED) & _join(has_log_prob, np.bool_)

    def tensor(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    advantages = [
        np.full(s.response_length, prepared.advantages_S[p], np.float32)
        for p, s in zip(positions, samples, strict=True)
    ]
    return MicroBatch(
        positions=tuple(positions),
        lengths=tuple(s.response_length for s in samples),
        tokens=tensor(row.tokens),
        position_ids=tensor(row.position_ids),
        packed=PackedSequences.build(torch.from_numpy(row.cu_seqlens), max_seqlen=row.max_seqlen, device=device),
        predicting=tensor(row.response_positions),
        targets=tensor(row.target_tokens[row.response_positions]),
        mask=tensor(mask),
        weights=tensor(_join([prepared.weights[p] for p in positions], np.float32)),
        advantages=tensor(_join([missing, *advantages], np.float32)),
        rollout_log_probs=tensor(_join(rollout, np.float32)),
        sampled=tensor(sampled.astype(np.float32)),
        versions=tensor(versions),
    )


def _join(parts: Sequence[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate([np.asarray(p, dtype) for p in parts]) if parts else np.zeros(0, dtype)
