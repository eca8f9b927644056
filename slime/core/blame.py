"""Describes the cause of an error in one sentence: the user's line in a long traceback, or how a process ended."""

from __future__ import annotations

import re
import signal
import socket
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slime.core.engine_interface import ASK_AGAIN
from slime.core.files import tail_of
from slime.core.text import visible

# A user's function runs deep inside Ray, threads and event loops. The user wants to see one line of the traceback: the
# last line in the user's own code.

RAISED_AT = ", raised at "
"""Separates a reason from its place. Places are ignored when failures are grouped by reason."""

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)', re.MULTILINE)
_OURS = str(Path(__file__).resolve().parents[1]) + "/"
_PYTHON = tuple({sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib")})
_PACKAGES = ("/site-packages/", "/dist-packages/")


@dataclass(frozen=True, slots=True)
class Place:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    @property
    def is_library(self) -> bool:
        """Whether the code belongs to Python or an installed package."""
        return self.file.startswith(("<", *_PYTHON)) or any(part in self.file for part in _PACKAGES)

    @property
    def is_ours(self) -> bool:
        return self.file.startswith(_OURS)


def blamed(places: Iterable[Place]) -> Place | None:
    """Returns the last frame in the user's code, else the last in slime's, else None. `places`: outermost first."""
    own = [place for place in places if not place.is_library]
    users = [place for place in own if not place.is_ours]
    return next(reversed(users or own), None)


def place_of(error: BaseException) -> Place | None:
    """Returns the line to blame for `error`, chosen by `blamed`."""
    frames = traceback.extract_tb(error.__traceback__)
    return blamed(Place(frame.filename, frame.lineno or 0, frame.name) for frame in frames)


def place_in(trace: str) -> Place | None:
    """Does the same as `place_of` for a printed traceback, including chained errors."""
    found = (Place(m["file"], int(m["line"]), m["function"]) for m in _FRAME.finditer(trace))
    return blamed(found)


def raised_by_user(error: BaseException) -> str:
    """Returns `, raised at FILE:LINE in FUNCTION` if a user's function raised it; else empty."""
    place = place_of(error)
    return f"{RAISED_AT}{place}" if place is not None and not place.is_ours else ""


def causes(error: BaseException) -> list[BaseException]:
    """Returns the error, its causes and contexts, and the members of error groups, each once."""
    found, left = dict[int, BaseException](), [error]
    while left:
        one = left.pop()
        if id(one) not in found:
            found[id(one)] = one
            inner = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
            left += [more for more in (one.__cause__, one.__context__, *inner) if more is not None]
    return list(found.values())


def asks_again(error: BaseException) -> bool:
    """Returns whether an HTTP 503 caused the error. An engine responds with 503 if a weight sync ended the request.

    Recognises errors of aiohttp, httpx, requests and the OpenAI and Anthropic clients; in a stream, the error text.
    """
    return any(_says_503(one) or ASK_AGAIN in str(one) for one in causes(error))


def _says_503(error: BaseException) -> bool:
    answers = (error, getattr(error, "response", None))
    return 503 in [getattr(answer, name, None) for answer in answers for name in ("status", "status_code")]


def error_line(error: BaseException, limit: int = 400) -> str:
    """Returns `Type: text`, with the first line of the text."""
    return first_line(f"{type(error).__name__}: {error}".rstrip(": "), limit)


def first_line(text: str, limit: int = 400) -> str:
    """Returns the first line that is not blank, at most `limit` characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= limit else line[: limit - 3] + "..."


# How a process ended, in one sentence. The sentence leaves out the pid, which is useless after the process has ended.

TAIL_BYTES, MOST_LINES = 16_000, 12
"""Number of bytes of a log that are searched, and number of lines that are shown."""
CRASHES = ("Fatal Python error:", "terminate called", "Traceback (most recent call last):")
"""First words of a crash report."""


def how_it_ended(status: int | None) -> str:
    """Returns a phrase for messages. `status`: return code of `subprocess`, negative for a signal; None if unknown."""
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
    """A process of the run, for messages."""

    name: str
    """The name for messages, such as `training rank 3`."""
    host: str
    log: Path | None = None
    """The log file. It must be in a folder that all hosts share, because the reader may be on a different host."""

    def __str__(self) -> str:
        return f"{self.name} on {self.host}"

    def ended(self, status: int | None, *, during: str = "") -> str:
        """Returns a sentence, such as `training rank 3 on node7 was killed by SIGKILL during training step 5; its log
        is /runs/x/logs/train_3.log`, followed by the crash report in the log, if any."""
        said = f"{self} {how_it_ended(status)}" + (f" during {during}" if during else "")
        if self.log is None:
            return said
        crash = crash_in(self.log)
        return f"{said}; its log is {self.log}" + (", which ends so:\n" + crash if crash else "")


def here(name: str, log: Path | None = None) -> Process:
    """Returns a process on this host."""
    return Process(name, socket.gethostname(), log)


def crash_in(log: Path) -> str:
    """Returns the last crash report of Python or C++ in a log; empty if there is none, for example after SIGKILL."""
    try:
        lines = tail_of(log, TAIL_BYTES).splitlines()
    except OSError:
        return ""
    begin = next((i for i in reversed(range(len(lines))) if lines[i].startswith(CRASHES)), None)
    return "" if begin is None else visible("\n".join(f"  {line}" for line in lines[begin:][:MOST_LINES]))
