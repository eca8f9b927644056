"""Shared prefixes: samples of a group start with the same tokens, which are computed once per row.

A sample adds only the tokens that it does not share with an earlier sample of its group in the row. So the row is a
prefix tree of the group and contains the prompt and each shared turn once. Attention is causal, so the result for a
shared token is valid for every sample that contains it.

Invariants
1. Tokens are shared only if all inputs of the forward pass are equal, for them and for all tokens before them.
2. The last token of a sample is never shared, so every sample has a sequence in its row.
3. Tokens are shared only within a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slime.core.batch import Elsewhere, TrainSample

LEAST_SHARED = 16
"""Minimum length of a shared prefix. Sharing copies the keys of the row, so shorter prefixes do not pay off."""
MOST_COPIED = 8
"""Maximum number of copied keys on a rank, as a multiple of its token limit. Shared keys are copied for each sample
that reads them. The limit bounds the memory for these copies and still allows an eightfold reduction in compute.
"""

Tokens = npt.NDArray[np.int32]
Record = npt.NDArray[Any] | Elsewhere
"""[at most T - 1, ...] recorded experts of a sample's first tokens; the others have none."""


@dataclass(frozen=True, slots=True)
class Shared:
    """The prefix that a sample shares with an earlier sample of the row."""

    source: int
    """Index of the earlier sample in the row, or -1."""
    num_tokens: int
    """Length of the common prefix."""


NOTHING = Shared(-1, 0)


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Finds common prefixes in a batch."""

    tokens_S: Sequence[Tokens]
    group_S: Sequence[int]
    record_S: Sequence[Record] | None = None
    """Recorded experts; None if experts are not replayed, so that equal prefixes imply equal experts."""
    least: int = LEAST_SHARED
    """Minimum length of a shared prefix."""

    @classmethod
    def of(cls, samples: Sequence[TrainSample], *, replays: bool) -> Prefixes:
        """`replays`: recorded experts are replayed (`--use-rollout-routing-replay`), so they must match, too."""
        records = [_NO_RECORD if s.routed_experts is None else s.routed_experts for s in samples]
        return cls([s.tokens for s in samples], [s.group_index for s in samples], records if replays else None)

    def longest(self, position: int, others: Sequence[int]) -> Shared:
        """Returns the longest prefix that a sample shares with one of `others`, the first one on ties. `source` is an
        index into `others`.
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
        """Returns how many of the first `common` tokens also have the same experts."""
        if self.record_S is None:
            return common
        a, b = (_comparable(self.record_S[p])[:common] for p in (position, other))
        size = min(len(a), len(b))
        alike = _common(a[:size], b[:size])
        return common if alike == len(a) == len(b) else alike

    def in_tree_order(self, positions: Sequence[int]) -> list[int]:
        """Sorts samples by their groups, in the order in which the groups first occur, and by their tokens.

        So the samples below any fork of a group's tree are neighbours, and each shares most with the sample before it.
        """
        of_group: dict[int, list[int]] = {}
        for position in positions:
            of_group.setdefault(self.group_S[position], []).append(position)
        # Big-endian bytes of ids, which are not negative, compare like the ids.
        return [
            p for own in of_group.values() for p in sorted(own, key=lambda p: self.tokens_S[p].astype(">i4").tobytes())
        ]

    def of_row(self, positions: Sequence[int]) -> tuple[Shared, ...]:
        """Returns, for each sample of a row, the prefix that it shares with an earlier sample."""
        return tuple(self.longest(position, positions[:place]) for place, position in enumerate(positions))


_NO_RECORD = np.zeros(0, np.uint64)


def _comparable(record: Record) -> npt.NDArray[Any]:
    """Returns rows to compare, [rows, ...]: digests for a remote record, if it has them, to avoid fetching it."""
    if isinstance(record, np.ndarray):
        return record
    return np.asarray(record) if record.digests is None else record.digests


def _may_exceed(known: int, a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Returns whether the common prefix can be longer than `known`, by comparing a single token."""
    return known < min(len(a), len(b)) and bool(a[known] == b[known])


def _common(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """Returns the length of the common prefix of two arrays of equal length."""
    if not len(a):
        return 0
    differs = (a != b).any(axis=tuple(range(1, a.ndim)))
    return int(differs.argmax()) if differs.any() else len(a)
