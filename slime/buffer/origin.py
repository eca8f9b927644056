"""What the Data Buffer remembers of a group that is out: where it came from, and how it was when it was issued."""

from __future__ import annotations

from dataclasses import dataclass

from slime.core.prompt import PromptRow

BLANK = PromptRow(prompt="", prompt_tokens=None, label=None, metadata={}, source="")
"""The prompt of every group when there is no dataset: the rollout function makes its own."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a group is made from; enough to make it anew."""

    row: int | None
    """Dataset row; None without a dataset."""
    first_index: int
    num_executions: int


@dataclass(frozen=True, slots=True)
class Issued:
    """A group in flight, as it was when issued. JSON text, because the rollout works on the samples in place."""

    attempts: int
    snapshot: str | None
    """None: it was new, and its origin says it all."""
