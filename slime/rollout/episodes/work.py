"""What travels between the rollout and its workers: a group to be worked on, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.buffer.groups import GroupRecord
from slime.core.sample import Group
from slime.rollout.execute import Outcome
from slime.rollout.types import DynamicFilterOutput, Progress
from slime.settings.eval_config import EvalDatasetConfig


@dataclass(frozen=True, slots=True)
class Work:
    """A group for a worker."""

    number: int
    """Of this work, by which it is cancelled."""
    scope: int | None
    """Number of the scope of its requests, in the rollout's process; None for an evaluation."""
    rollout_id: int | None
    params: Mapping[str, Any]
    """Sampling parameters."""
    group: Group
    """Packed: its numbers are arrays. Of an evaluation: one execution."""
    dataset: EvalDatasetConfig | None = None
    """Of an evaluation."""


@dataclass(frozen=True, slots=True)
class Done:
    """A group from a worker."""

    record: GroupRecord
    """The group: text and arrays that nobody has to look into before it is trained."""
    outcome: Outcome
    reason: str
    verdict: DynamicFilterOutput | None
    progress: Progress
    """Tokens and failures of this work."""
