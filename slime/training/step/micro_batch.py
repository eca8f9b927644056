"""From the prepared batch to the tensors of one forward pass and its loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slime.algorithms.sequences import Sequences
from slime.core.sample import NOT_SAMPLED
from slime.data.packing import pack
from slime.models.common.attention import PackedSequences
from slime.training.model.context import packed_sequences
from slime.training.step.prepare import PreparedBatch
from slime.training.step.targets import Arrays


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The tensors of one forward pass on the device; R is the number of response tokens of all its samples."""

    positions: tuple[int, ...]
    """Positions in the batch of its samples, in packing order; empty for a dummy."""
    lengths: tuple[int, ...]
    """Response tokens of each sample."""
    total_lengths: tuple[int, ...]
    """Tokens of each sample, prompt included."""
    tokens: Tensor
    """[T] int64"""
    position_ids: Tensor
    """[T] int64"""
    packed: PackedSequences
    predicting: Tensor
    """[R] int64 index in [0, T) whose hidden state predicts the response token."""
    targets: Tensor
    """[R] int64"""
    sequences: Sequences
    """Which sample each response token belongs to."""
    mask: Tensor
    """[R] float32"""
    weights: Tensor
    """[R] float32, zero where masked."""
    shares: Tensor
    """[R] float32, zero where masked: weights of a mean over the trained tokens of the step."""
    unit: float
    """See `PreparedBatch.units`."""
    rollout_log_probs: Tensor
    """[R] float32; meaningless where `sampled` is 0."""
    sampled: Tensor
    """[R] float32: 1 where an engine's log-prob is there and the token is trained."""
    versions: Tensor
    """[R] int32 weight version of each token."""
    advantages: Tensor
    """[R] float32; zero before targets are known."""
    old_log_probs: Tensor | None
    """[R] float32, of the policy before the update; None if the pass that is trained gives them."""
    old_full_log_probs: Tensor | None
    """[R] float32, of the whole distribution, where sampling was cut by top-k or top-p."""
    ref_log_probs: Tensor | None
    """[R] float32"""
    old_values: Tensor | None
    """[R] float32, of the critic before its update."""
    returns: Tensor | None
    """[R] float32, the critic's targets."""


def to_device(
    prepared: PreparedBatch,
    positions: Sequence[int],
    device: torch.device,
    *,
    pad_to_multiple: int = 1,
    pad_each_to: int = 1,
) -> MicroBatch:
    """Packs the samples at `positions` and puts their tensors on the device; padding as in `pack`."""
    samples = [prepared.batch.samples[p] for p in positions]
    row = pack(samples, pad_to_multiple=pad_to_multiple, pad_each_to=pad_each_to)
    lengths = tuple(s.response_length for s in samples)
    mask = _join([prepared.masks[p] for p in positions], np.float32)
    versions = _join([s.token_versions for s in samples], np.int32)
    rollout = [
        np.zeros(n, np.float32) if s.rollout_log_probs is None else s.rollout_log_probs
        for s, n in zip(samples, lengths, strict=True)
    ]
    has_log_prob = [np.full(s.response_length, s.rollout_log_probs is not None) for s in samples]
    sampled = (mask > 0) & (versions != NOT_SAMPLED) & _join(has_log_prob, np.bool_)

    def tensor(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    def of(arrays: Arrays | None) -> Tensor | None:
        return None if arrays is None else tensor(_join([arrays[p] for p in positions], np.float32))

    signals, aims = prepared.signals, prepared.targets
    advantages = of(aims.advantages) if aims is not None else torch.zeros(sum(lengths), device=device)
    assert advantages is not None, "targets always hold advantages"
    return MicroBatch(
        positions=tuple(positions),
        lengths=lengths,
        total_lengths=tuple(s.num_tokens for s in samples),
        tokens=tensor(row.tokens),
        position_ids=tensor(row.position_ids),
        packed=packed_sequences(torch.from_numpy(row.cu_seqlens), max_seqlen=row.max_seqlen, device=device),
        predicting=tensor(row.response_positions),
        targets=tensor(row.target_tokens[row.response_positions]),
        sequences=Sequences(tensor(np.repeat(np.arange(len(samples)), lengths)), len(samples)),
        mask=tensor(mask),
        weights=tensor(_join([prepared.weights[p] for p in positions], np.float32)),
        shares=tensor(_join([prepared.shares[p] for p in positions], np.float32)),
        unit=max((prepared.units[p] for p in positions), default=0.0),
        rollout_log_probs=tensor(_join(rollout, np.float32)),
        sampled=tensor(sampled.astype(np.float32)),
        versions=tensor(versions),
        advantages=advantages,
        old_log_probs=of(signals.old),
        old_full_log_probs=of(signals.old_full),
        ref_log_probs=of(signals.ref),
        old_values=of(signals.values),
        returns=of(aims.returns) if aims is not None else None,
    )


def _join(parts: Sequence[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate([np.asarray(p, dtype) for p in parts]) if parts else np.zeros(0, dtype)
