"""`StartProgress`: which of the processes that start side by side are ready, and what the others are doing.

The driver polls it (`tell`) while `wait_for` waits; nobody wakes it. It asks Ray which calls have ended, and reads the
logs of engines where the run folder is on this host or shared with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.cluster.waiting import all_there
from slime.observability.progress import StartUp
from slime.serving.server import IMPORTING, engine_phase

READ_BYTES = 2**20
"""Of an engine's log; it is some kilobytes long when the engine is up."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Calls that end when one part of the run is ready."""

    name: str
    """Of the phase."""
    refs: Sequence[Any]
    line: str
    """What is true when all have ended."""


class StartProgress:
    """One start."""

    def __init__(
        self,
        startup: StartUp,
        waiting: Sequence[Waiting],
        *,
        began_s: float,
        note: Callable[[str], str],
        engine_logs: Sequence[Path] = (),
        ended: Callable[[Sequence[Any]], bool] = all_there,
    ) -> None:
        """`began_s`: when the processes were started, of `time.monotonic()`; `note`: shows a text;
        `ended`: whether all of some calls have.
        """
        self._startup, self._note, self._ended = startup, note, ended
        self._waiting = [w for w in waiting if w.refs]
        self._engine_logs, self._imported = engine_logs, False
        self._began_s = began_s

    def tell(self) -> str:
        """Tells of the parts that became ready since the last call, and notes what is waited for."""
        seconds = time.monotonic() - self._began_s
        for waiting in [w for w in self._waiting if self._ended(w.refs)]:
            self._waiting.remove(waiting)
            self._startup.done(waiting.name, waiting.line, seconds)
        names = [w.name for w in self._waiting]
        if "engines" in names:
            phases = sorted({_phase_of(log) for log in self._engine_logs})
            if not self._imported and not any(phase.startswith(IMPORTING) for phase in phases):
                self._imported = True
                self._startup.part("engine_import", seconds)
            names[names.index("engines")] = f"engines ({', '.join(phases)})"
        return self._note(f"waiting for {', '.join(names)}" if names else "")


def _phase_of(log: Path) -> str:
    try:
        with log.open(errors="replace") as file:
            return engine_phase(file.read(READ_BYTES))
    except OSError:
        return IMPORTING
