"""Describes the cause of an error in one sentence: the line of user code in a long traceback, or how a process died."""

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

# A user function runs deep inside Ray, threads and event loops, so tracebacks are long. The user only needs the
# innermost line of their own code.

RAISED_AT = ", raised at "
"""Separates the reason from the code location. Locations are ignored when failures are grouped by reason."""

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
    """Returns the innermost frame in user code, else in slime, else None. `places`: frames, outermost first."""
    own = [place for place in places if not place.is_library]
    users = [place for place in own if not place.is_ours]
    return next(reversed(users or own), None)


def place_of(error: BaseException) -> Place | None:
    """Returns the line to blame for `error` (see `blamed`)."""
    frames = traceback.extract_tb(error.__traceback__)
    return blamed(Place(frame.filename, frame.lineno or 0, frame.name) for frame in frames)


def place_in(trace: str) -> Place | None:
    """Like `place_of`, but for a printed traceback. Includes chained exceptions."""
    found = (Place(m["file"], int(m["line"]), m["function"]) for m in _FRAME.finditer(trace))
    return blamed(found)


def raised_by_user(error: BaseException) -> str:
    """Returns `, raised at FILE:LINE in FUNCTION` if user code raised the error, else an empty string."""
    place = place_of(error)
    return f"{RAISED_AT}{place}" if place is not None and not place.is_ours else ""


def causes(error: BaseException) -> list[BaseException]:
    """Returns the error, its causes and contexts, and the members of exception groups, without duplicates."""
    found, left = dict[int, BaseException](), [error]
    while left:
        one = left.pop()
        if id(one) not in found:
            found[id(one)] = one
            inner = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
            left += [more for more in (one.__cause__, one.__context__, *inner) if more is not None]
    return list(found.values())


def asks_again(error: BaseException) -> bool:
    """Returns whether HTTP 503 caused the error. Engines respond with 503 when a weight sync aborts a request.

    Recognises errors of aiohttp, httpx, requests, and the OpenAI and Anthropic clients, and the error text in streams.
    """
    return any(_says_503(one) or ASK_AGAIN in str(one) for one in causes(error))


def _says_503(error: BaseException) -> bool:
    answers = (error, getattr(error, "response", None))
    return 503 in [getattr(answer, name, None) for answer in answers for name in ("status", "status_code")]


def error_line(error: BaseException, limit: int = 400) -> str:
    """Returns `Type: message` with the first line of the message."""
    return first_line(f"{type(error).__name__}: {error}".rstrip(": "), limit)


def first_line(text: str, limit: int = 400) -> str:
    """Returns the first non-blank line, shortened to `limit` characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= limit else line[: limit - 3] + "..."


# Messages about a dead process omit the pid, which is useless by then.

TAIL_BYTES, MOST_LINES = 16_000, 12
"""How many bytes at the end of a log are searched for a crash report, and how many lines are shown."""
CRASHES = ("Fatal Python error:", "terminate called", "Traceback (most recent call last):")
"""How the first line of a crash report begins."""


def how_it_ended(status: int | None) -> str:
    """Describes an exit status. `status`: a `subprocess` return code (negative for a signal), or None if unknown."""
    if status is None:
        return "was killed or crashed"
    if status >= 0:
        return f"exited with code {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the run, as named in messages."""

    name: str
    """Display name, such as `training rank 3`."""
    host: str
    log: Path | None = None
    """The log file. Must be on storage shared by all hosts, because another host may read it."""

    def __str__(self) -> str:
        return f"{self.name} on {self.host}"

    def ended(self, status: int | None, *, during: str = "") -> str:
        """Returns a sentence like `training rank 3 on node7 was killed by SIGKILL during training step 5; its log is
        /runs/x/logs/train_3.log`, followed by the crash report from the log, if there is one."""
        said = f"{self} {how_it_ended(status)}" + (f" during {during}" if during else "")
        if self.log is None:
            return said
        crash = crash_in(self.log)
        return f"{said}; its log is {self.log}" + (", which ends with:\n" + crash if crash else "")


def here(name: str, log: Path | None = None) -> Process:
    """Returns a `Process` on this host."""
    return Process(name, socket.gethostname(), log)


def crash_in(log: Path) -> str:
    """Returns the last Python or C++ crash report in a log, or an empty string (for example after SIGKILL)."""
    try:
        lines = tail_of(log, TAIL_BYTES).splitlines()
    except OSError:
        return ""
    begin = next((i for i in reversed(range(len(lines))) if lines[i].startswith(CRASHES)), None)
    return "" if begin is None else visible("\n".join(f"  {line}" for line in lines[begin:][:MOST_LINES]))
