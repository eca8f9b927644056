"""Formatting of text for display: escapes control characters, shortens text, formats lists and names; `EngineKeys`.

Text from models, tools and datasets can also end up in exceptions. All such text must pass through `visible` before it
is printed to a terminal.
"""

from __future__ import annotations

import difflib
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

BIDI = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c")
"""Unicode characters that change the text direction and can make a line look like a different one."""


def visible(text: str) -> str:
    """Escapes control characters other than newline and tab, because a terminal would interpret them."""
    return "".join(c if c in "\n\t" or not _is_control(c) else _escape(c) for c in text)


def _is_control(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cs") or character in BIDI


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def shorten(text: str, limit: int) -> str:
    """Shortens text to about `limit` characters by replacing the middle with the number of omitted characters."""
    left_out = len(text) - limit
    if left_out <= 0:
        return text
    head = (limit + 1) // 2
    return f"{text[:head]} [... {left_out} characters left out ...] {text[len(text) - (limit - head) :]}"


def one_line(text: str, limit: int) -> str:
    """Puts text on one line: applies `visible`, replaces line breaks with ⏎ and tabs with spaces, and shortens it."""
    return shorten(visible(text).replace("\n", "⏎").replace("\t", " "), limit)


def listed(names: Sequence[str], limit: int = 8) -> str:
    """Formats names as `a, b and 3 more`, showing at most `limit` names. Returns `none` for an empty list."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more or "none"


def step_name(step: int, num_steps: int | None = None) -> str:
    """Names a step as all messages do: `step 3`, or `step 3 of 0..5` if the number of steps is known."""
    return f"step {step}" if not num_steps else f"step {step} of 0..{num_steps - 1}"


def evaluation_name(step: int, num_steps: int | None = None) -> str:
    """Names the time of an evaluation: `after step 3`, or `before step 0` if `step` is -1."""
    return "before step 0" if step < 0 else f"after {step_name(step, num_steps)}"


def ends_whole(path: Path) -> bool:
    """Returns False if the last line has no line break because its writer was killed. Raises `OSError`."""
    with path.open("rb") as file:
        if not file.seek(0, 2):
            return True
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that `name` probably misspells, or None (`mamba` does not count as close to `llama`)."""
    near = difflib.get_close_matches(name, list(known), 1, cutoff=0.7)
    return near[0] if near else None


# --- Names of programs


def program(command: str = "") -> str:
    """Returns the command that started this program: `slime` with `command`, or `python train.py` for a loop."""
    return f"python {sys.argv[0]}" if _is_script() and not _is_slime() else slime_command(command)


def slime_command(words: str) -> str:
    """Returns a slime command line, which starts with `python -m slime` if the user started Python."""
    return f"{'python -m slime' if _is_script() else 'slime'} {words}".strip()


def _started() -> Path:
    return Path(sys.argv[0] if sys.argv else "")


def _is_script() -> bool:
    """Returns whether the user started a Python file, not the console script `slime`. False in tests."""
    return _started().suffix == ".py" and "pytest" not in _started().parts


def _is_slime() -> bool:
    parts = _started().parts
    return parts[-2:] == ("slime", "__main__.py") or parts[-3:] == ("slime", "cli", "main.py")


HIDDEN = "<hidden>"
"""Replaces secrets in output."""


@dataclass(frozen=True, slots=True)
class EngineKeys:
    """API keys of the engines. With two separate keys, users who can generate cannot also replace the weights."""

    use: str | None = field(default=None, repr=False)
    """Key for generation requests from the run, the router and users. None: no key is required."""
    admin: str | None = field(default=None, repr=False)
    """SGLang's `admin_api_key` for control requests (weights, memory, pause, abort). Users do not have it. None:
    control requests use the `use` key."""

    @property
    def control(self) -> str | None:
        return self.admin or self.use


NO_KEYS = EngineKeys()
