"""Splits the model's text into thinking, text and tool calls. One file per family of formats.

    parsed = format.reader(tools, prompt_end).all(text)

Invariants
1. A reader never raises, whatever the text. A call that cannot be parsed stays text, and `ill_formed` is set.
2. The parts that a reader returns add up to the thinking and text of `Parsed`, regardless of how the input was split.
3. Tools are rejected if the model's format is unknown (`known_format`).
"""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from slime.core.errors import ConfigError
from slime.core.registry import Registry

OPEN, CLOSE = "<think>", "</think>"
"""Markers around thinking in the templates of Qwen3, DeepSeek, GLM and others."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The parsed end of a response, starting at the first call marker."""

    found: tuple[tuple[str, str], ...]
    """(function, JSON text of its arguments) for each call, in order."""
    rest: str = ""
    """Text between and after the calls."""
    ill_formed: bool = False
    """Whether a call could not be parsed; its text is in `rest`."""


@dataclass(frozen=True, slots=True)
class Parsed:
    text: str
    reasoning: str | None
    calls: tuple[tuple[str, str], ...]
    ill_formed: bool


class ToolFormat(ABC):
    """How a family of models writes tool calls."""

    name: ClassVar[str]
    marks: ClassVar[tuple[str, ...]]
    """Strings that begin a call. `read` gets the text from the first one onwards."""
    signs: ClassVar[tuple[str, ...]] = ()
    """Strings that all occur in every chat template of the family."""
    breaks: ClassVar[tuple[str, ...]] = ()
    """The subset of `marks` that also ends unclosed thinking, as in SGLang's parsers for the family."""
    thought: ClassVar[re.Pattern[str]] = re.compile(rf"(?:{OPEN}(?:(?!{OPEN}).)*?)?{CLOSE}\n{{0,2}}", re.S)
    """Matches the thinking in a turn. If the prompt opens it, earlier turns may contain only the end marker."""

    @abstractmethod
    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        """Parses `text`, which begins with one of `marks`."""

    def reader(self, tools: Sequence[Any] = (), prompt_end: str = "") -> AnswerReader:
        """Returns a reader for one response. `tools`: in chat-template form; without tools, nothing counts as a call.
        `prompt_end`: end of the prompt, which may have opened the thinking.
        """
        return Reader(self, tools, prompt_end)

    def can_constrain(self, prompt_end: str) -> bool:
        """Whether a response to a prompt with this end may be constrained as a whole, since no thinking precedes it."""
        return not prompt_end.rstrip().endswith(OPEN)

    def call_id(self, name: str, number: int) -> str:
        """Returns a new id for a call. `number`: position of the call in its conversation, from 0.

        The tool result refers to the call by this id, and some chat templates show it to the model.
        """
        return f"call_{secrets.token_hex(12)}"


FORMATS: Registry[ToolFormat] = Registry(
    "tool format", flag="tool_format", package="slime.agent.parsers", contract=ToolFormat
)


class AnswerReader(ABC):
    ends: ClassVar[frozenset[str]] = frozenset()
    """End tokens that the reader needs to see."""

    @abstractmethod
    def feed(self, text: str) -> list[tuple[str, str]]:
        """Adds text. Returns the parts ("thinking" | "text", text) that can no longer change."""

    @abstractmethod
    def end(self) -> tuple[list[tuple[str, str]], Parsed]:
        """Ends the response. Returns the parts that were buffered, and the complete parse."""

    def all(self, text: str) -> Parsed:
        self.feed(text)
        return self.end()[1]


class Reader(AnswerReader):
    """Reads responses of the form: thinking between `<think>` and `</think>`, then text, then calls."""

    def __init__(self, format: ToolFormat, tools: Sequence[Any] = (), prompt_end: str = "") -> None:
        self._format, self._tools = format, tools
        self._marks, self._breaks = (format.marks, format.breaks) if tools else ((), ())
        self._thinks = prompt_end.rstrip().endswith(OPEN)
        self._begun, self._pending = self._thinks, ""
        self._trims = self._thinks
        """Whether to drop the next newlines, because they belong to a thinking marker."""
        self._thoughts: list[str] = []
        self._words: list[str] = []
        self._calls: list[str] | None = None
        self._blank: list[str] = []
        """Leading whitespace, dropped if a thinking marker follows."""
        self._doubt: list[str] | None = None
        """Text inside the thinking from a call marker onwards. It is thinking if `</think>` follows, else a call."""
        self._edge = ""
        """The last characters of `_doubt`, where `</think>` may begin."""

    def feed(self, text: str) -> list[tuple[str, str]]:
        if self._calls is not None:
            self._calls.append(text)
            return []
        if not self._begun and not self._pending and (not text or text.isspace()):
            self._blank.append(text)
            return []
        self._pending = "".join([self._pending, *self._blank, text])
        self._blank.clear()
        return self._out(last=False)

    def end(self) -> tuple[list[tuple[str, str]], Parsed]:
        self._pending += "".join(self._blank)
        parts = self._out(last=True)
        calls = Calls(())
        if self._calls is not None:
            calls = self._format.read("".join(self._calls), self._tools)
            if calls.rest:
                parts.append(self._say(calls.rest))
        text, thoughts = "".join(self._words), "".join(self._thoughts)
        return parts, Parsed(text, thoughts or None, calls.found, calls.ill_formed)

    def _out(self, *, last: bool) -> list[tuple[str, str]]:
        parts: list[tuple[str, str]] = []
        if not self._begun and not self._opened(last):
            return parts
        if self._trims:
            self._pending = self._pending.lstrip("\n")
            self._trims = not self._pending
        if self._thinks:
            parts += self._thinking(last)
        return parts if self._thinks else parts + self._text(last)

    def _thinking(self, last: bool) -> list[tuple[str, str]]:
        if self._doubt is not None:
            return self._doubted(last)
        marks = (CLOSE, *self._breaks)
        at, mark = min(((at, m) for m in marks if (at := self._pending.find(m)) >= 0), default=(-1, ""))
        end = at if mark else len(self._pending) - (0 if last else begins(self._pending, marks))
        parts = self._think(self._pending[:end])
        self._pending = self._pending[end:]
        if mark == CLOSE:
            self._close()
        elif mark:
            self._doubt = []
            return parts + self._doubted(last)
        return parts

    def _doubted(self, last: bool) -> list[tuple[str, str]]:
        """Searches for `</think>` after a call marker inside the thinking, in linear time."""
        assert self._doubt is not None, "must follow a call marker"
        self._doubt.append(self._pending)
        seen, self._pending = self._edge + self._pending, ""
        self._edge = seen[1 - len(CLOSE) :]
        if CLOSE in seen or last:
            whole, self._doubt = "".join(self._doubt), None
            at = whole.find(CLOSE)
            parts = self._think(whole[: max(0, at)])
            self._pending, self._thinks = whole[max(0, at) :], False
            if at >= 0:
                self._close()
            return parts
        return []

    def _think(self, thought: str) -> list[tuple[str, str]]:
        if not thought:
            return []
        self._thoughts.append(thought)
        return [("thinking", thought)]

    def _close(self) -> None:
        """Ends the thinking at the closing marker at the start of `_pending`."""
        self._pending, self._thinks = self._pending[len(CLOSE) :].lstrip("\n"), False
        self._trims = not self._pending

    def _opened(self, last: bool) -> bool:
        """Returns whether there is enough text to tell if the response begins with thinking."""
        start = self._pending.lstrip()
        if start.startswith(OPEN):
            self._thinks, self._pending = True, start[len(OPEN) :].lstrip("\n")
            self._trims = not self._pending
        elif OPEN.startswith(start) and not last:
            return False
        self._begun = True
        return True

    def _text(self, last: bool) -> list[tuple[str, str]]:
        places = [at for mark in self._marks if (at := self._pending.find(mark)) >= 0]
        keep = 0 if last else begins(self._pending, self._marks)
        end = min(places) if places else len(self._pending) - keep
        parts = [self._say(self._pending[:end])] if end else []
        self._pending = self._pending[end:]
        if places:
            self._calls, self._pending = [self._pending], ""
        return parts

    def _say(self, text: str) -> tuple[str, str]:
        self._words.append(text)
        return "text", text


def begins(text: str, marks: Sequence[str]) -> int:
    """Returns how many characters at the end of `text` may be the beginning of a marker."""
    longest = max(map(len, marks), default=0)
    ends = (n for n in range(min(longest - 1, len(text)), 0, -1) if any(m.startswith(text[-n:]) for m in marks))
    return next(ends, 0)


class UntilStop:
    """Ends a text before the first of some stop strings, however the text is split.

    The engine ends a response with the token that completes a stop string, and that token is trained. An agent gets the
    text before the stop string, as from OpenAI and Anthropic.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = stops, ""
        self.found: str | None = None
        """The stop string that was found."""

    def more(self, text: str) -> str:
        """Adds text. Returns what certainly comes before a stop string."""
        if self.found is not None or not self._stops:
            return "" if self._stops else text
        text = self._held + text
        at, stop = min(((at, stop) for stop in self._stops if (at := text.find(stop)) >= 0), default=(-1, ""))
        if at >= 0:
            self.found, self._held = stop, ""
            return text[:at]
        end = len(text) - begins(text, self._stops)
        self._held = text[end:]
        return text[:end]

    def end(self) -> str:
        """Returns what was held back, which no stop string completed."""
        held, self._held = self._held, ""
        return held


def format_of(template: str) -> str | None:
    """Returns the format whose `signs` all occur in a chat template; if several match, the one with the most."""
    fits = [entry for _, entry in FORMATS if entry.signs and all(sign in template for sign in entry.signs)]
    return max(fits, key=lambda entry: len(entry.signs)).name if fits else None


def format_or_text(template: str, name: str | None = None) -> ToolFormat:
    """Returns the format `name`, or the chat template's; if it is unknown, `text`, in which nothing is a call."""
    return FORMATS.build(name or format_of(template) or "text", None)


def known_format(template: str, name: str | None = None) -> ToolFormat:
    """Returns the format `name`, or the chat template's format. Raises `ConfigError` if the format is unknown."""
    name = name or format_of(template)
    if name is None:
        known = ", ".join(sorted({entry.name for _, entry in FORMATS if entry.signs}))
        raise ConfigError(
            "the chat template does not use a known tool-call format, so calls would stay text; set the format with "
            f"--agent-tool-format ({known}, or the import path of your own class), set a different template with "
            "--chat-template FILE, or use --agent-tool-format text to leave calls as text"
        )
    return FORMATS.build(name, None)
