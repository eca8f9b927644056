"""Whose fault it was: what an error of code that is not slime's comes of, and how a process of the run ended, each in
one sentence.
"""

from __future__ import annotations

import re
import signal
import socket
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slime.core.files import tail_of
from slime.core.ports import ASK_AGAIN
from slime.core.text import visible

# What an error of code that is not slime's comes of: the user's own file and line, or a request that was taken back.
#
# A user's function runs deep inside a trace of Ray, threads and event loops; the one line that its author wants to see
# is the last of his own.

RAISED_AT = ", raised at "
"""Stands between a reason and its place; what follows it does not belong to the reason's kind."""

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)', re.MULTILINE)
_OURS = str(Path(__file__).resolve().parents[1]) + "/"
_PYTHON = tuple({sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib")})
_PACKAGES = ("/site-packages/", "/dist-packages/")


@dataclass(frozen=True, slots=True)
class Place:
    """One line of code that was running."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    @property
    def is_library(self) -> bool:
        """Python's own code, or that of an installed package."""
        return self.file.startswith(("<", *_PYTHON)) or any(part in self.file for part in _PACKAGES)

    @property
    def is_ours(self) -> bool:
        """Code of slime."""
        return self.file.startswith(_OURS)


def blamed(places: Iterable[Place]) -> Place | None:
    """Of frames, outermost first: the last one of the user's, else slime's last one; None without either."""
    own = [place for place in places if not place.is_library]
    users = [place for place in own if not place.is_ours]
    return next(reversed(users or own), None)


def place_of(error: BaseException) -> Place | None:
    """Where `error` was raised, as `blamed` says."""
    frames = traceback.extract_tb(error.__traceback__)
    return blamed(Place(frame.filename, frame.lineno or 0, frame.name) for frame in frames)


def place_in(trace: str) -> Place | None:
    """The same of a trace as Python prints it; of a chain, of the whole of it."""
    found = (Place(m["file"], int(m["line"]), m["function"]) for m in _FRAME.finditer(trace))
    return blamed(found)


def raised_by_user(error: BaseException) -> str:
    """`, raised at FILE:LINE in FUNCTION` if a user's function raised it; else nothing."""
    place = place_of(error)
    return f"{RAISED_AT}{place}" if place is not None and not place.is_ours else ""


def causes(error: BaseException) -> list[BaseException]:
    """An error, what it was made of, and what a group of errors holds."""
    found, left = dict[int, BaseException](), [error]
    while left:
        one = left.pop()
        if id(one) not in found:
            found[id(one)] = one
            inner = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
            left += [more for more in (one.__cause__, one.__context__, *inner) if more is not None]
    return list(found.values())


def asks_again(error: BaseException) -> bool:
    """Whether it comes of an answer with HTTP 503, which an engine gives where a weight sync ended the request.

    As aiohttp, httpx, requests and the clients of OpenAI and Anthropic say it; a stream has the text alone.
    """
    return any(_says_503(one) or ASK_AGAIN in str(one) for one in causes(error))


def _says_503(error: BaseException) -> bool:
    answers = (error, getattr(error, "response", None))
    return 503 in [getattr(answer, name, None) for answer in answers for name in ("status", "status_code")]


def one_line(error: BaseException, limit: int = 400) -> str:
    """`Type: text` of an exception, its first line."""
    return first_line(f"{type(error).__name__}: {error}".rstrip(": "), limit)


def first_line(text: str, limit: int = 400) -> str:
    """The first line with something on it, at most `limit` characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= limit else line[: limit - 3] + "..."


# How a process of the run ended, in one sentence, wherever that is reported: what it was, on which host, how it ended,
# and where its log is. A pid would name nobody: the process is gone.

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
        lines = tail_of(log, TAIL_BYTES).splitlines()
    except OSError:
        return ""
    begin = next((i for i in reversed(range(len(lines))) if lines[i].startswith(CRASHES)), None)
    return "" if begin is None else visible("\n".join(f"  {line}" for line in lines[begin:][:MOST_LINES]))
