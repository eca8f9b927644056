"""Text for people: makes control characters visible, shortens long text, lists names. Also defines the engines' keys.

Exceptions may also contain text from models, tools and datasets. All such text goes through `visible` before it reaches
a terminal.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

BIDI = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c")
"""Unicode marks that change the direction of text, so that a line can look like a different one."""


def visible(text: str) -> str:
    """Escapes control characters, except newline and tab, because a terminal would act on them."""
    return "".join(c if c in "\n\t" or not _is_control(c) else _escape(c) for c in text)


def _is_control(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cs") or character in BIDI


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def shorten(text: str, limit: int) -> str:
    """Shortens text to about `limit` characters: replaces the middle with a note of how much is left out."""
    left_out = len(text) - limit
    if left_out <= 0:
        return text
    head = (limit + 1) // 2
    return f"{text[:head]} [... {left_out} characters left out ...] {text[len(text) - (limit - head) :]}"


def one_line(text: str, limit: int) -> str:
    """Applies `visible` and `shorten`, and replaces line breaks with a sign, so that the text fits on one line."""
    return shorten(visible(text).replace("\n", "⏎").replace("\t", " "), limit)


def listed(names: Sequence[str], limit: int = 8) -> str:
    """Returns `a, b and 3 more`, with at most `limit` names; `none` for an empty list."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more or "none"


def ends_whole(path: Path) -> bool:
    """Returns whether the file ends with a line break, which is missing if its writer was killed. Raises `OSError`."""
    with path.open("rb") as file:
        if not file.seek(0, 2):
            return True
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that `name` may be a typo of; None if no name is close (`mamba` is far from `llama`)."""
    near = difflib.get_close_matches(name, list(known), 1, cutoff=0.7)
    return near[0] if near else None


HIDDEN = "<hidden>"
"""Replaces secrets in output."""


@dataclass(frozen=True, slots=True)
class EngineKeys:
    """API keys of the engines. There are two keys, so that users with access to generation cannot replace weights."""

    use: str | None = field(default=None, repr=False)
    """The key for requests by the run's own code, the router and users. None: requests need no key."""
    admin: str | None = field(default=None, repr=False)
    """SGLang's `admin_api_key`, for weights, memory, pauses and aborts. Users do not have this key. None: `use` is also
    the key for these requests."""

    @property
    def control(self) -> str | None:
        return self.admin or self.use


NO_KEYS = EngineKeys()
