"""Which ends of a run another start can mend, and when to stop trying. Pure decisions; `restarting` carries them out.

    ends that are faults       a process is gone (`ActorDied`, the driver itself), an engine or the router was given up
                               (`EngineError`), a host or Ray failed (`ClusterFailed`), a wait ran out
    ends that would come back  a mistake in the settings, an exception of a hook, a library or of ours, numbers that are
                               not finite, a request that can never succeed, groups that fail one after the other
    ends that somebody asked for  Ctrl-C, SIGTERM

Invariants
1. There are at most as many restarts as asked for.
2. After `MOST_IN_VAIN` starts in a row that trained no step beyond those before, there is no other one.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.core.blame import one_line
from slime.core.errors import ClusterFailed, DeadlineExceeded, EngineError, GroupsFailed, RequestRejected

MOST_IN_VAIN = 2
"""Starts in a row that may end without one more step."""
FAULTS = (EngineError, ClusterFailed, DeadlineExceeded)
LASTING = (RequestRejected, GroupsFailed)
"""Of the faults those that are none: what was asked for fails, wherever it runs."""
REASON_CHARS = 400
NO_STEP = -1


@dataclass(frozen=True, slots=True)
class End:
    """How a start ended, other than well."""

    reason: str
    """In one line."""
    is_fault: bool
    """Whether another start may end otherwise."""

    @classmethod
    def by(cls, error: BaseException) -> End:
        """The end that an error is."""
        said = one_line(error, REASON_CHARS) if isinstance(error, Exception) else type(error).__name__
        return cls(said, isinstance(error, FAULTS) and not isinstance(error, LASTING))


class Restarts:
    """The restarts of one run: how many there were, and whether they helped."""

    def __init__(self, most: int, trained: int = NO_STEP) -> None:
        """`trained`: the last step that the record of the run has, `NO_STEP` without any."""
        self.most, self.number = most, 0
        self._trained, self._in_vain = trained, 0

    def refusal(self, end: End, trained: int) -> str | None:
        """Why the run does not start again; None if it does, and that counts. `trained`: the last step by now."""
        self._in_vain = 0 if trained > self._trained else self._in_vain + 1
        self._trained = max(trained, self._trained)
        if not end.is_fault:
            return "another start would end the same way"
        if self.number >= self.most:
            return f"--max-restarts {self.most} are used up"
        if self._in_vain >= MOST_IN_VAIN:
            return (
                f"{self._in_vain} starts in a row have not trained one step more than those before, so another one "
                f"would not help; the last one ended by: {end.reason}"
            )
        self.number += 1
        return None
