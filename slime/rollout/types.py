"""Results of rollout functions and filters, and the progress that the driver displays."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slime.core.sample import Sample
from slime.observability.samples import ShownSample

SampleGroup = list[Sample]
"""All samples of one prompt, with fan-outs flattened."""


@dataclass(slots=True)
class RolloutFnTrainOutput:
    """The result of a rollout function for one training step."""

    samples: list[SampleGroup]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class RolloutFnEvalOutput:
    """The result of an evaluation function."""

    data: dict[str, dict[str, Any]]
    """Dataset name -> {"rewards": [S] floats, "truncated": [S] bools, "samples": [S]}."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepNews:
    """What the driver logs for a step or an evaluation."""

    metrics: dict[str, float]
    samples: list[ShownSample]
    """A few samples to display."""
    span_s: tuple[float, float] | None = None
    """When the generation started and ended, in Unix time."""
    warnings: tuple[str, ...] = ()
    """What the driver shows on the console (`slime.observability.logs.TELL_DRIVER`)."""


@dataclass(frozen=True, slots=True)
class DynamicFilterOutput:
    """Verdict of a dynamic sampling filter on one group."""

    keep: bool
    reason: str | None = None
    """Counted as `rollout/dynamic_filter/drop_<reason>`."""
    keep_when_insufficient: bool = False
    """With `keep=False`: keep the group anyway if accepted and running groups cannot fill the step without it."""


@dataclass(slots=True)
class Progress:
    """The current state of a rollout, written by the rollout task and polled by the driver."""

    unit: str = ""
    """What `done` and `total` count: groups (rollout) or executions (evaluation)."""
    done: int = 0
    total: int = 0
    tokens: int = 0
    """Response tokens of finished executions."""
    arrived: Callable[[], int] | None = None
    """Returns how many tokens this process has received from engines so far. None in a worker."""
    num_failures: int = 0
    """Execution attempts that failed or got no score."""
    last_failure: str = ""
    started: float = field(default_factory=time.monotonic)
    _arrived_before: int = 0
    _seen: tuple[int, float] = (0, 0.0)
    """The number of tokens at its last change, and the time of that change."""

    def begin(self, unit: str, total: int) -> None:
        """Starts a new phase with all counts at zero."""
        self.unit, self.total, self.done, self.tokens, self.started = unit, total, 0, 0, time.monotonic()
        self.num_failures, self.last_failure = 0, ""
        self._arrived_before, self._seen = self.arrived() if self.arrived is not None else 0, (0, self.started)

    def failed(self, reason: str) -> str:
        """Counts a failure so that users see it before the step fails. Returns the reason."""
        self.num_failures, self.last_failure = self.num_failures + 1, reason
        return reason

    def add(self, other: Progress) -> None:
        """Adds the counts of another process."""
        self.tokens += other.tokens
        self.num_failures += other.num_failures
        self.last_failure = other.last_failure or self.last_failure

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def _num_sampled(self) -> int:
        """Returns the tokens so far, including those of unfinished responses. The rate is measured up to the latest
        token, so that the line does not change while nothing arrives.
        """
        arrived = self.arrived() - self._arrived_before if self.arrived is not None else 0
        tokens = max(self.tokens, arrived)
        if tokens != self._seen[0]:
            self._seen = tokens, time.monotonic()
        return tokens

    def __str__(self) -> str:
        if not self.total:
            return ""
        line = f"{self.done}/{self.total} {self.unit}"
        if tokens := self._num_sampled():  # nothing is known before the first tokens arrive
            line += f", {tokens / max(self._seen[1] - self.started, 1.0):.0f} tokens/s"
        return f"{line}; {self.num_failures} failures, last: {self.last_failure}" if self.num_failures else line
