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

from slime.core.batch import TrainSample

LEAST_SHARED = 16
"""Tokens that are worth it: keys of a row with shared tokens are copied."""
MOST_READ = 8
"""How many times its limit of tokens a micro-batch may have as keys, which are copied for each sample that sees them:
few, because copies take memory, and enough for the computation to be an eighth."""

Columns = tuple[npt.NDArray[Any], ...]
"""What a forward pass reads of each token of a sample, an entry a token: ids [T] first, then what else there is. Beyond
its end a column has nothing to say of a token."""


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

    columns_S: Sequence[Columns]
    group_S: Sequence[int]
    least: int = LEAST_SHARED
    """Fewer common tokens are not shared."""

    @classmethod
    def of(cls, samples: Sequence[TrainSample], *, replays: bool) -> Prefixes:
        """`replays`: the engine's record says which experts a token goes to (`--use-rollout-routing-replay`)."""
        return cls([_columns(s, replays=replays) for s in samples], [s.group_index for s in samples])

    def longest(self, position: int, others: Sequence[int]) -> Shared:
        """The longest prefix that the sample at `position` shares with one of `others`; the first of equals.

        `Shared.source` is a place in `others`.
        """
        own, best = self.columns_S[position], NOTHING
        for place, other in enumerate(others):
            columns = self.columns_S[other]
            if self.group_S[other] != self.group_S[position] or not _may_exceed(best.num_tokens, own[0], columns[0]):
                continue
            common = min(_common(a, b) for a, b in zip(own, columns, strict=True))
            if common > best.num_tokens:
                best = Shared(place, common)
        num_tokens = min(best.num_tokens, len(own[0]) - 1)
        return Shared(best.source, num_tokens) if num_tokens >= max(self.least, 1) else NOTHING

    def of_row(self, positions: Sequence[int]) -> tuple[Shared, ...]:
        """What each of a row's samples has from one before it."""
        return tuple(self.longest(position, positions[:place]) for place, position in enumerate(positions))


def _columns(sample: TrainSample, *, replays: bool) -> Columns:
    if not replays:
        return (sample.tokens,)
    ids = sample.routed_experts
    return sample.tokens, np.zeros((0, 1, 1), np.uint8) if ids is None else np.asarray(ids)


def _may_exceed(known: int, a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Whether more than `known` tokens can be equal, by a look at one of them."""
    return known < min(len(a), len(b)) and bool(a[known] == b[known])


def _common(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """How many entries from the first on say the same of a token."""
    size = min(len(a), len(b))
    differs = (a[:size] != b[:size]).any(axis=tuple(range(1, a.ndim)))
    if differs.any():
        return int(differs.argmax())
    return size if len(a) != len(b) else np.iinfo(np.int64).max
