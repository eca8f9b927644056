"""Text for people: hostile characters spelled out, long text without its middle, and whether a file ends whole.

Text of a model, of a tool or of a dataset also comes inside an exception; whatever may hold some of it goes through
`visible` before it reaches a terminal.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

BIDI = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c")
"""They turn the order of a line around, so that it reads as something else."""


def visible(text: str) -> str:
    """`text` with control characters spelled out, but for newline and tab: a terminal obeys the others."""
    return "".join(c if c in "\n\t" or not _is_control(c) else _escape(c) for c in text)


def _is_control(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cs") or character in BIDI


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def shorten(text: str, limit: int) -> str:
    """At most about `limit` characters: the middle goes, and its place says how much of it."""
    left_out = len(text) - limit
    if left_out <= 0:
        return text
    head = (limit + 1) // 2
    return f"{text[:head]} [... {left_out} characters left out ...] {text[len(text) - (limit - head) :]}"


def one_line(text: str, limit: int) -> str:
    """As `shorten`, visible, on one line: a line break becomes a sign."""
    return shorten(visible(text).replace("\n", "⏎").replace("\t", " "), limit)


def listed(names: Sequence[str], limit: int = 8) -> str:
    """`a, b and 3 more`: at most `limit` names; `none` without any."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more or "none"


def ends_whole(path: Path) -> bool:
    """Whether the last line has its end: False where a kill left it half done. Raises `OSError` if it is missing."""
    with path.open("rb") as file:
        if not file.seek(0, 2):
            return True
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` is a slip of; None if nothing is so near: nobody who writes `mamba` means `llama`."""
    near = difflib.get_close_matches(name, list(known), 1, cutoff=0.7)
    return near[0] if near else None


# Secrets: what is written in place of one, and the keys of engines.

HIDDEN = "<hidden>"


@dataclass(frozen=True, slots=True)
class EngineKeys:
    """What engines ask for. Who may generate need not be allowed to replace weights."""

    use: str | None = field(default=None, repr=False)
    """For requests: what the run's own code, the router and its users send. None: they ask for nothing."""
    admin: str | None = field(default=None, repr=False)
    """For what changes or ends something (SGLang's `admin_api_key`): weights, memory, pauses, aborts. No user has it.
    None: the engines ask for `use` there, too."""

    @property
    def control(self) -> str | None:
        """What control routes ask for."""
        return self.admin or self.use


NO_KEYS = EngineKeys()
