"""Shared prefixes: samples of one prompt begin with the same tokens, and a row computes these once.

A sample adds to its row only the tokens that no earlier sample of its group has in that row. So the row is the tree of
the group's prefixes: it contains the prompt and each shared turn only once. The result for a token is valid for every
sample that contains the token, because no token sees later ones.

Invariants
1. Tokens are shared only if everything that a forward pass reads of them, and of all tokens before them, is equal.
2. The last token of a sample is never shared, so that each sample has a sequence in its row.
3. Only samples of one group share tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slime.core.batch import Elsewhere, TrainSample

LEAST_SHARED = 16
"""Shorter prefixes are not worth sharing, because the keys of a row with shared tokens are copied."""
MOST_READ = 8
"""Maximum number of a rank's keys, as a multiple of its token limit. Keys are copied for each sample that sees them.
This limit bounds the memory for copies, but still allows an eightfold reduction of the computation.
"""

Tokens = npt.NDArray[np.int32]
Record = npt.NDArray[Any] | Elsewhere
"""[at most T - 1, ...] the experts of a sample's tokens; later tokens have no record."""


@dataclass(frozen=True, slots=True)
class Shared:
    """The prefix that a sample of a row shares with an earlier one."""

    source: int
    """Index of the earlier sample in the row; -1 without one."""
    num_tokens: int
    """Length of the common prefix."""


NOTHING = Shared(-1, 0)


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Finds common prefixes in a batch."""

    tokens_S: Sequence[Tokens]
    group_S: Sequence[int]
    record_S: Sequence[Record] | None = None
    """Recorded experts; None if the tokens up to a token determine its experts."""
    least: int = LEAST_SHARED
    """Shorter prefixes are not shared."""

    @classmethod
    def of(cls, samples: Sequence[TrainSample], *, replays: bool) -> Prefixes:
        """`replays`: recorded experts are replayed (`--use-rollout-routing-replay`), so they must be equal as well."""
        records = [_NO_RECORD if s.routed_experts is None else s.routed_experts for s in samples]
        return cls([s.tokens for s in samples], [s.group_index for s in samples], records if replays else None)

    def longest(self, position: int, others: Sequence[int]) -> Shared:
        """Returns the longest prefix that a sample shares with one of `others`; the first of equally long ones.
        `source` is an index into `others`.
        """
        own, best = self.tokens_S[position], NOTHING
        for place, other in enumerate(others):
            tokens = self.tokens_S[other]
            if self.group_S[other] != self.group_S[position] or not _may_exceed(best.num_tokens, own, tokens):
                continue
            size = min(len(own), len(tokens))
            common = min(_common(own[:size], tokens[:size]), len(own) - 1)
            if common >= max(best.num_tokens + 1, self.least):
                common = self._alike(position, other, common)
            if common >= max(best.num_tokens + 1, self.least):
                best = Shared(place, common)
        return best

    def _alike(self, position: int, other: int, common: int) -> int:
        """Returns the number of tokens, at most the first `common`, whose experts are equal as well."""
        if self.record_S is None:
            return common
        a, b = (_comparable(self.record_S[p])[:common] for p in (position, other))
        size = min(len(a), len(b))
        alike = _common(a[:size], b[:size])
        return common if alike == len(a) == len(b) else alike

    def of_row(self, positions: Sequence[int]) -> tuple[Shared, ...]:
        """Returns, for each sample of a row, the prefix that it shares with an earlier sample."""
        return tuple(self.longest(position, positions[:place]) for place, position in enumerate(positions))


_NO_RECORD = np.zeros(0, np.uint64)


def _comparable(record: Record) -> npt.NDArray[Any]:
    """Returns comparable rows, [rows, ...]: digests for a remote record, which then need not be fetched."""
    if isinstance(record, np.ndarray):
        return record
    return np.asarray(record) if record.digests is None else record.digests


def _may_exceed(known: int, a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Returns whether more than `known` tokens can be equal; compares only one token."""
    return known < min(len(a), len(b)) and bool(a[known] == b[known])


def _common(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """Returns the length of the common prefix of two arrays of equal length."""
    if not len(a):
        return 0
    differs = (a != b).any(axis=tuple(range(1, a.ndim)))
    return int(differs.argmax()) if differs.any() else len(a)
