"""What an error of code that is not slime's comes of: the user's own file and line, or a request that was taken back.

A user's function runs deep inside a trace of Ray, threads and event loops; the one line that its author wants to see is
the last of his own.
"""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slime.core.ports import ASK_AGAIN

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
