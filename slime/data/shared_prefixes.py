"""Shared prefixes: samples of one prompt begin alike, and what they have in common is computed once in a row.

A sample adds to its row what no sample of its group before it in that row has: the prompt stands there once, a turn
that several samples went through too, and the row is the tree of the group's prefixes. What was computed for a token
holds for every sample that goes through it, because no token sees one behind it.

Invariants
1. Tokens are shared only where everything that a forward pass reads of them, and of all tokens before them, is equal.
2. The last token of a sample is always its own, so that no sample vanishes from its row.
3. Only samples of one group share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slime.core.batch import Elsewhere, TrainSample

LEAST_SHARED = 16
"""Tokens that are worth it: keys of a row with shared tokens are copied."""
MOST_READ = 8
"""How many times its limit of tokens a rank may have as keys, which are copied for each sample that sees them: few,
because copies take memory, and enough for the computation to be an eighth."""

Tokens = npt.NDArray[np.int32]
Record = npt.NDArray[Any] | Elsewhere
"""[at most T - 1, ...] the experts that a sample's tokens go to; behind its end nothing is said of a token."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What a sample of a row has from a sample before it."""

    source: int
    """Number of that sample in the row; -1 if there is none."""
    num_tokens: int
    """How many tokens from the first on; 0 if there is none."""


NOTHING = Shared(-1, 0)


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Which samples of a batch begin alike."""

    tokens_S: Sequence[Tokens]
    group_S: Sequence[int]
    record_S: Sequence[Record] | None = None
    """None: a token's experts follow from the tokens before it."""
    least: int = LEAST_SHARED
    """Fewer common tokens are not shared."""

    @classmethod
    def of(cls, samples: Sequence[TrainSample], *, replays: bool) -> Prefixes:
        """`replays`: the engine's record says which experts a token goes to (`--use-rollout-routing-replay`)."""
        records = [_NO_RECORD if s.routed_experts is None else s.routed_experts for s in samples]
        return cls([s.tokens for s in samples], [s.group_index for s in samples], records if replays else None)

    def longest(self, position: int, others: Sequence[int]) -> Shared:
        """The longest prefix that the sample at `position` shares with one of `others`; the first of equals.

        `Shared.source` is a place in `others`.
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
        """Of `common` equal tokens those whose experts are the same, too."""
        if self.record_S is None:
            return common
        a, b = (_comparable(self.record_S[p])[:common] for p in (position, other))
        size = min(len(a), len(b))
        alike = _common(a[:size], b[:size])
        return common if alike == len(a) == len(b) else alike

    def of_row(self, positions: Sequence[int]) -> tuple[Shared, ...]:
        """What each of a row's samples has from one before it."""
        return tuple(self.longest(position, positions[:place]) for place, position in enumerate(positions))


_NO_RECORD = np.zeros(0, np.uint64)


def _comparable(record: Record) -> npt.NDArray[Any]:
    """[rows, ...] by which rows are compared: of a record that is elsewhere its digests, so that nobody fetches it
    whose sample it is not.
    """
    if isinstance(record, np.ndarray):
        return record
    return np.asarray(record) if record.digests is None else record.digests


def _may_exceed(known: int, a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Whether more than `known` tokens can be equal, by a look at one of them."""
    return known < min(len(a), len(b)) and bool(a[known] == b[known])


def _common(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """How many entries of two arrays of one length are equal, from the first on."""
    if not len(a):
        return 0
    differs = (a != b).any(axis=tuple(range(1, a.ndim)))
    return int(differs.argmax()) if differs.any() else len(a)
