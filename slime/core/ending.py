"""How a process of the run ended, in one sentence, wherever that is reported: what it was, on which host, how it ended,
and where its log is. A pid would name nobody: the process is gone.
"""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

from slime.core.text import visible

TAIL_BYTES, MOST_LINES = 16_000, 12
"""Of a log: how much is read, and shown."""
CRASHES = ("Fatal Python error:", "terminate called", "Traceback (most recent call last):")
"""How the last words of a process begin."""


def how_it_ended(status: int | None) -> str:
    """Of an exit status as `subprocess` gives it, negative for a signal; None if nobody knows."""
    if status is None:
        return "was killed, or it crashed"
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the run as people know it."""

    name: str
    """With its rank or number: `training rank 3`."""
    host: str
    log: Path | None = None
    """It is read where the sentence is formed, so it lies in a folder that all hosts share."""

    def __str__(self) -> str:
        return f"{self.name} on {self.host}"

    def ended(self, status: int | None, *, during: str = "") -> str:
        """`training rank 3 on node7 was killed by SIGKILL during training step 5; its log is /runs/x/logs/train_3.log`,
        with the lines of a crash if it wrote any.
        """
        said = f"{self} {how_it_ended(status)}" + (f" during {during}" if during else "")
        if self.log is None:
            return said
        crash = crash_in(self.log)
        return f"{said}; its log is {self.log}" + (", which ends so:\n" + crash if crash else "")


def here(name: str, log: Path | None = None) -> Process:
    """Of this host."""
    return Process(name, socket.gethostname(), log)


def crash_in(log: Path) -> str:
    """What Python or C++ wrote last, of a crash; empty if they wrote nothing, as in a process that was killed."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    begin = next((i for i in reversed(range(len(lines))) if lines[i].startswith(CRASHES)), None)
    return "" if begin is None else visible("\n".join(f"  {line}" for line in lines[begin:][:MOST_LINES]))
