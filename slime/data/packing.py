"""Packs variable-length sequences end to end into one row, with the indices needed to unpack it.

The model predicts the token at index `t` of a sequence at index `t - 1`. So every per-token quantity of the loss (mask,
rollout log-prob, advantage) belongs to the predicting position.

If samples share a prefix (`slime.data.shared_prefixes`), a sequence contains only the tokens that its sample does not
share with an earlier one.

Invariants
1. Sequences are contiguous and in input order; `cu_seqlens` starts at 0 and ends at T.
2. A position id is a token's index in its sample. It restarts in every sequence, at 0 or after the shared tokens.
3. Row padding is a sequence at the end of the row; sequence padding (`pad_each_to`) is at the end of the sequence.
   Neither predicts a response token, and attention is causal, so no real token sees padding.
4. `response_positions` has duplicates only for shared tokens. Without duplicates, a scatter followed by a gather is the
   identity.
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
"""Padding id. Any id works, because padding is neither trained on nor attended to."""
_NONE = np.zeros(0, np.int64)
_ID_BITS = 32
"""Number of low bits that hold the token id in a packed (position, token) integer."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One micro-batch of N samples as one row of T tokens; R_total is the sum of their response lengths."""

    tokens: Int64s
    """[T]"""
    position_ids: Int64s
    """[T] index of each token in its sample."""
    cu_seqlens: npt.NDArray[np.int32]
    """[N + 1], or [N + 2] if the last sequence is padding: start of each sequence, then T. Lengths include padding."""
    max_seqlen: int
    """Length of the longest sequence, including padding."""
    target_tokens: Int64s
    """[R_total] response tokens, sample by sample."""
    response_positions: Int64s
    """[R_total] row position that predicts each response token."""
    token_rows: tuple[Int64s, ...]
    """N arrays [T_s]: row position of each token of a sample."""
    num_shared: tuple[int, ...]
    """[N] number of tokens that each sample shares with an earlier one. They are not in its own sequence."""

    @property
    def prefixes(self) -> tuple[Int64s, ...] | None:
        """The row positions of the shared tokens before each sequence; None if nothing is shared."""
        if not any(self.num_shared):
            return None
        own = [rows[:n] for rows, n in zip(self.token_rows, self.num_shared, strict=True)]
        return *own, *[_NONE] * (len(self.cu_seqlens) - 1 - len(own))

    def log_prob_requests(self) -> tuple[Int64s, Int64s, Int64s | None]:
        """Returns the log-probs to compute, without duplicates: (positions [U], tokens [U], answers [R_total] or None).

        Entry i is the log-prob of `tokens[i]` at `positions[i]`. `answers` maps each response token to its entry;
        samples that share a token share its entry. None means one entry per response token, in order.
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
    """Packs samples into a row. Pads each sample to a multiple of `pad_each_to`, and the row to `pad_to_multiple`.

    With context parallelism, `pad_each_to` is twice the context-parallel size. With sequence parallelism, each rank's
    share of the row must be divisible by the tensor-parallel size. `shared` is the prefix that each sample shares with
    an earlier one; None: no sharing. Without samples, the row is a dummy: one padding sequence and N = 0. Raises
    `DataError` for a sample without tokens, or without a token before its response.
    """
    if pad_to_multiple < 1 or pad_each_to < 1:
        raise ConfigError(f"pad_to_multiple={pad_to_multiple} and pad_each_to={pad_each_to} must be at least 1")
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
        before = rows[known.source][: known.num_tokens] if known.num_tokens else _NONE
        rows.append(np.concatenate([before, np.arange(start, start + n, dtype=np.int64)]))
    predicting = [r[len(r) - s.response_length - 1 : -1] for r, s in zip(rows, samples, strict=True)]
    starts = [*firsts, 0]
    return PackedBatch(
        tokens=tokens,
        position_ids=np.concatenate([np.arange(a, a + n) for a, n in zip(starts, lengths, strict=False)]),
        cu_seqlens=cu_seqlens,
        max_seqlen=max(lengths),
        target_tokens=np.concatenate(
            [_NONE, *(s.tokens[s.num_tokens - s.response_length :].astype(np.int64) for s in samples)]
        ),
        response_positions=np.concatenate([_NONE, *predicting]),
        token_rows=tuple(rows),
        num_shared=tuple(firsts),
    )


def _check_sample(sample: TrainSample) -> None:
    if sample.num_tokens < 1:
        raise DataError(f"sample {sample.index} has no tokens; a sequence needs at least one")
    if sample.response_length >= sample.num_tokens:
        raise DataError(
            f"sample {sample.index} has {sample.response_length} response tokens out of {sample.num_tokens} tokens, so "
            "nothing predicts the first one; give every sample a prompt"
        )
