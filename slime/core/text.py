"""Text for people: control characters made visible, long text shortened, lists of names; and the keys of engines.

Text of a model, a tool or a dataset also gets into exceptions. Any text that may contain some goes through `visible`
before it reaches a terminal.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

BIDI = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c")
"""They reverse the order of a line, so that it reads as something else."""


def visible(text: str) -> str:
    """`text` with control characters escaped, except newline and tab, because a terminal would obey them."""
    return "".join(c if c in "\n\t" or not _is_control(c) else _escape(c) for c in text)


def _is_control(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cs") or character in BIDI


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def shorten(text: str, limit: int) -> str:
    """At most about `limit` characters: replaces the middle by a note of its length."""
    left_out = len(text) - limit
    if left_out <= 0:
        return text
    head = (limit + 1) // 2
    return f"{text[:head]} [... {left_out} characters left out ...] {text[len(text) - (limit - head) :]}"


def one_line(text: str, limit: int) -> str:
    """As `shorten` and `visible`, on one line: a sign replaces each line break."""
    return shorten(visible(text).replace("\n", "⏎").replace("\t", " "), limit)


def listed(names: Sequence[str], limit: int = 8) -> str:
    """`a, b and 3 more`: at most `limit` of the names; `none` without any."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more or "none"


def ends_whole(path: Path) -> bool:
    """Whether the last line ends with a line break; not after a kill while writing. Raises `OSError` if missing."""
    with path.open("rb") as file:
        if not file.seek(0, 2):
            return True
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` may be a typo of; None if none is near (nobody who writes `mamba` means `llama`)."""
    near = difflib.get_close_matches(name, list(known), 1, cutoff=0.7)
    return near[0] if near else None


HIDDEN = "<hidden>"
"""Replaces secrets in what is shown."""


@dataclass(frozen=True, slots=True)
class EngineKeys:
    """Keys that engines ask for. Users who may generate need not be allowed to replace weights."""

    use: str | None = field(default=None, repr=False)
    """For requests by the run's own code, the router and users. None: requests need no key."""
    admin: str | None = field(default=None, repr=False)
    """SGLang's `admin_api_key`, for weights, memory, pauses and aborts; no user has it. None: engines ask for `use`."""

    @property
    def control(self) -> str | None:
        return self.admin or self.use


NO_KEYS = EngineKeys()
