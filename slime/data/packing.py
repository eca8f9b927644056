"""Packing: several sequences of unequal length laid end to end in one row, with what the trainer needs to split it.

A trained token at index `t` of a sequence is *predicted* at index `t - 1`: every per-token quantity of the loss
(trained or not, rollout log-prob, advantage) belongs to the predicting position, where the model's output for it is.

Samples may share a prefix (`slime.data.shared_prefixes`). A sequence of the row is then what a sample does not have
from one before it, and the rest of the sample stands where that one has it.

Invariants
1. Sequences are contiguous and in the given order; `cu_seqlens` starts at 0 and ends at T.
2. A position id says where a token stands in its sample, and so restarts in every sequence: at 0, or behind what is
   shared.
3. Padding of the row is a trailing sequence of its own, and padding of a sequence (`pad_each_to`) stands behind its
   end. Neither predicts a response token and, by causality, neither is seen by anything real.
4. `response_positions` has no duplicates but of tokens that samples share: without these, scattering then gathering
   gives back exactly what went in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slime.core.batch import TrainSample
from slime.core.errors import ConfigError, DataError
from slime.data.shared_prefixes import NOTHING, Shared

Int64s = npt.NDArray[np.int64]
PAD_TOKEN = 0
"""Filler id; never trained and never attended to, so any id of the vocabulary would do."""
_ID_BITS = 32
"""Of a pair of a position and a token id."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One micro-batch of N samples as one row of T tokens; R_total is the sum of their response lengths."""

    tokens: Int64s
    """[T]"""
    position_ids: Int64s
    """[T] index within its sample."""
    cu_seqlens: npt.NDArray[np.int32]
    """[N + 1], or [N + 2] when the last sequence is padding: where each sequence starts, its padding included, then
    T."""
    max_seqlen: int
    """Length in tokens of the longest sequence, padding included."""
    target_tokens: Int64s
    """[R_total] the response tokens, sample by sample in order."""
    response_positions: Int64s
    """[R_total] position in [0, T) that predicts each of them."""
    token_rows: tuple[Int64s, ...]
    """[N] of [T_s]: where in the row each token of a sample stands."""
    num_shared: tuple[int, ...]
    """[N] tokens that each sample has from one before it: they stand outside its own sequence."""

    @property
    def prefixes(self) -> tuple[Int64s, ...] | None:
        """For each sequence of `cu_seqlens` the row positions of the tokens before it; None if nothing is shared."""
        if not any(self.num_shared):
            return None
        own = [rows[:n] for rows, n in zip(self.token_rows, self.num_shared, strict=True)]
        return *own, *[np.zeros(0, np.int64)] * (len(self.cu_seqlens) - 1 - len(own))

    def questions(self) -> tuple[Int64s, Int64s, Int64s | None]:
        """(positions [U], tokens [U], answers [R_total] or None): which token is asked for at which position, and which
        of these questions is that of each response token; None: each has its own, in order.

        Response tokens that samples share have one question.
        """
        if not any(self.num_shared):
            return self.response_positions, self.target_tokens, None
        pairs = (self.response_positions << _ID_BITS) + self.target_tokens
        asked, answers = np.unique(pairs, return_inverse=True)
        return asked >> _ID_BITS, asked & ((1 << _ID_BITS) - 1), answers


def pack(
    samples: Sequence[TrainSample],
    *,
    pad_to_multiple: int = 1,
    pad_each_to: int = 1,
    shared: Sequence[Shared] | None = None,
) -> PackedBatch:
    """Lays samples end to end: each padded to a multiple of `pad_each_to` tokens, the row to one of `pad_to_multiple`.

    Under context parallelism `pad_each_to` is twice its size. Under sequence parallelism the part of the row that a
    rank holds must divide by the tensor-parallel size. `shared`: what each sample has from one before it; None:
    nothing. No samples give a dummy: one padding sequence and N = 0, for ranks that have nothing to train. Raises
    `DataError` for a sample without tokens or without a token before its response.
    """
    if pad_to_multiple < 1 or pad_each_to < 1:
        raise ConfigError(f"got pad_to_multiple={pad_to_multiple}, pad_each_to={pad_each_to}; they must be at least 1")
    for s in samples:
        _check_sample(s)
    shared = [NOTHING] * len(samples) if shared is None else shared
    multiple = math.lcm(pad_to_multiple, pad_each_to)
    firsts = [known.num_tokens for known in shared]
    own = [s.num_tokens - first for s, first in zip(samples, firsts, strict=True)]
    lengths = [n + -n % pad_each_to for n in own]
    if num_padding := -sum(lengths) % multiple if lengths else multiple:
        lengths.append(num_padding)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    num_tokens = int(cu_seqlens[-1])

    tokens = np.full(num_tokens, PAD_TOKEN, np.int64)
    rows: list[Int64s] = []
    for start, n, s, known in zip(cu_seqlens.tolist(), own, samples, shared, strict=False):
        tokens[start : start + n] = s.tokens[known.num_tokens :]
        before = rows[known.source][: known.num_tokens] if known.num_tokens else np.zeros(0, np.int64)
        rows.append(np.concatenate([before, np.arange(start, start + n, dtype=np.int64)]))
    predicting = [r[len(r) - s.response_length - 1 : -1] for r, s in zip(rows, samples, strict=True)]
    starts = [*firsts, 0]
    return PackedBatch(
        tokens=tokens,
        position_ids=np.concatenate([np.arange(a, a + n) for a, n in zip(starts, lengths, strict=False)]),
        cu_seqlens=cu_seqlens,
        max_seqlen=max(lengths),
        target_tokens=_join([s.tokens[s.num_tokens - s.response_length :].astype(np.int64) for s in samples]),
        response_positions=_join(predicting),
        token_rows=tuple(rows),
        num_shared=tuple(firsts),
    )


def _join(parts: Sequence[Int64s]) -> Int64s:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _check_sample(sample: TrainSample) -> None:
    if sample.num_tokens < 1:
        raise DataError(f"sample {sample.index} has no tokens; a sequence needs at least one")
    if sample.response_length >= sample.num_tokens:
        raise DataError(
            f"sample {sample.index}: {sample.response_length} response tokens of {sample.num_tokens}, because the "
            "first response token is predicted from the token before it; give every sample a prompt"
        )
