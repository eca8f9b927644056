"""Packing: sequences of unequal length laid end to end in one row, with the indices to take the row apart again.

A token at index `t` of a sequence is *predicted* at index `t - 1`: every per-token quantity of the loss (mask, rollout
log-prob, advantage) belongs to the predicting position, at which the model outputs it.

Samples may share a prefix (`slime.data.shared_prefixes`). Then a sequence of the row has only the tokens that a
sample does not share with an earlier sample.

Invariants
1. Sequences are contiguous and in the given order; `cu_seqlens` starts at 0 and ends at T.
2. A position id is a token's index in its sample, so it restarts in every sequence: at 0, or after the shared tokens.
3. Padding of the row is a trailing sequence; padding of a sequence (`pad_each_to`) follows its end. Neither predicts a
   response token, and no real token sees padding, because attention is causal.
4. `response_positions` has duplicates only for tokens that samples share; without duplicates, scattering and then
   gathering is the identity.
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
"""Filler id; never trained or attended to, so any id works."""
_NONE = np.zeros(0, np.int64)
_ID_BITS = 32
"""The number of bits for the token id in a combined (position, token) number."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One micro-batch of N samples as one row of T tokens; R_total is the sum of their response lengths."""

    tokens: Int64s
    """[T]"""
    position_ids: Int64s
    """[T] index within its sample."""
    cu_seqlens: npt.NDArray[np.int32]
    """[N + 1], or [N + 2] if the last sequence is padding: the start of each sequence, then T. A sequence includes its
    padding.
    """
    max_seqlen: int
    """Tokens of the longest sequence, padding included."""
    target_tokens: Int64s
    """[R_total] response tokens, sample by sample."""
    response_positions: Int64s
    """[R_total] the position that predicts each response token."""
    token_rows: tuple[Int64s, ...]
    """N arrays [T_s]: the position in the row of each token of a sample."""
    num_shared: tuple[int, ...]
    """[N] tokens that each sample shares with an earlier one; its own sequence does not contain them."""

    @property
    def prefixes(self) -> tuple[Int64s, ...] | None:
        """The row positions of the shared tokens before each sequence; None if nothing is shared."""
        if not any(self.num_shared):
            return None
        own = [rows[:n] for rows, n in zip(self.token_rows, self.num_shared, strict=True)]
        return *own, *[_NONE] * (len(self.cu_seqlens) - 1 - len(own))

    def log_prob_requests(self) -> tuple[Int64s, Int64s, Int64s | None]:
        """Returns the log-probs to compute, each once: (positions [U], tokens [U], answers [R_total] or None).

        Entry i requests the log-prob of `tokens[i]` at `positions[i]`. `answers` is the index of the entry for each
        response token; None: one entry per response token, in order. Samples that share a response token share its
        entry.
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
    """Lays samples end to end. Pads each to a multiple of `pad_each_to` tokens, the row to one of `pad_to_multiple`.

    With context parallelism, `pad_each_to` is twice the context-parallel size. With sequence parallelism, a rank's part
    of the row must be divisible by the tensor-parallel size. `shared`: the tokens that each sample shares with an
    earlier one; None: nothing is shared. Without samples the row is a dummy: one padding sequence and N = 0. Raises
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
            f"sample {sample.index} has {sample.response_length} response tokens of {sample.num_tokens}, but the first "
            "response token is predicted from the token before it; give every sample a prompt"
        )
