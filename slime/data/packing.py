"""Packing: several sequences of unequal length laid end to end in one row, with what the trainer needs to split it.

A trained token at index `t` of a sequence is *predicted* at index `t - 1`: every per-token quantity of the loss
(trained or not, rollout log-prob, advantage) belongs to the predicting position, where the model's output for it is.

Invariants
1. Sequences are contiguous and in the given order; `cu_seqlens` starts at 0 and ends at T.
2. Position ids restart at 0 in every sequence; no target crosses from one sequence into the next.
3. Padding of the row is a trailing sequence of its own, and padding of a sequence (`pad_each_to`) stands behind its
   end. Neither predicts a response token and, by causality, neither is seen by anything real.
4. `response_positions` has no duplicates: scattering then gathering gives back exactly what went in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slime.core.batch import TrainSample
from slime.core.errors import ConfigError, DataError

PAD_TOKEN = 0
"""Filler id; never trained and never attended to, so any id of the vocabulary would do."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One micro-batch of N samples as one row of T tokens; R_total is the sum of their response lengths."""

    tokens: npt.NDArray[np.int64]
    """[T]"""
    position_ids: npt.NDArray[np.int64]
    """[T] index within its own sequence."""
    cu_seqlens: npt.NDArray[np.int32]
    """[N + 1], or [N + 2] when the last sequence is padding: where each sequence starts, its padding included, then
    T."""
    max_seqlen: int
    """Length in tokens of the longest sequence, padding included."""
    target_tokens: npt.NDArray[np.int64]
    """[T] the next token of the same sequence; 0 at the last position of each."""
    response_positions: npt.NDArray[np.int64]
    """[R_total] position in [0, T) that predicts each response token, sample by sample in order."""


def pack(samples: Sequence[TrainSample], *, pad_to_multiple: int = 1, pad_each_to: int = 1) -> PackedBatch:
    """Lays samples end to end: each padded to a multiple of `pad_each_to` tokens, the row to one of `pad_to_multiple`.

    Under context parallelism `pad_each_to` is twice its size. Under sequence parallelism the part of the row that a
    rank holds must divide by the tensor-parallel size. No samples give a dummy: one padding sequence and
    N = 0, for ranks that have nothing to train. Raises `DataError` for a sample without tokens or without a token
    before its response.
    """
    if pad_to_multiple < 1 or pad_each_to < 1:
        raise ConfigError(f"got pad_to_multiple={pad_to_multiple}, pad_each_to={pad_each_to}; they must be at least 1")
    for s in samples:
        _check_sample(s)
    multiple = math.lcm(pad_to_multiple, pad_each_to)
    lengths = [s.num_tokens + -s.num_tokens % pad_each_to for s in samples]
    if num_padding := -sum(lengths) % multiple if lengths else multiple:
        lengths.append(num_padding)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    num_tokens = int(cu_seqlens[-1])

    tokens = np.full(num_tokens, PAD_TOKEN, np.int64)
    target_tokens = np.zeros(num_tokens, np.int64)
    positions: list[npt.NDArray[np.int64]] = []
    for start, s in zip(cu_seqlens.tolist(), samples, strict=False):
        end = start + s.num_tokens
        tokens[start:end] = s.tokens
        target_tokens[start : end - 1] = s.tokens[1:]
        predicting = np.arange(end - s.response_length - 1, end - 1, dtype=np.int64)
        positions.append(predicting)
    return PackedBatch(
        tokens=tokens,
        position_ids=np.concatenate([np.arange(n, dtype=np.int64) for n in lengths]),
        cu_seqlens=cu_seqlens,
        max_seqlen=max(lengths),
        target_tokens=target_tokens,
        response_positions=np.concatenate(positions) if positions else np.zeros(0, np.int64),
    )


def _check_sample(sample: TrainSample) -> None:
    if sample.num_tokens < 1:
        raise DataError(f"sample {sample.index} has no tokens; a sequence needs at least one")
    if sample.response_length >= sample.num_tokens:
        raise DataError(
            f"sample {sample.index}: {sample.response_length} response tokens of {sample.num_tokens}, because the "
            "first response token is predicted from the token before it; give every sample a prompt"
        )
