"""What a model wrote, back into thinking, text and calls. One file per format of calls.

    parsed = Reader(format, tools, prompt_end).all(text)

Invariants
1. No text makes a reader raise: what cannot be read stays text, and `ill_formed` says that a call was tried.
2. The parts that a reader lets out, joined, are the thinking and the text of `Parsed`, wherever the text was split.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from slime.core.registry import Registry

OPEN, CLOSE = "<think>", "</think>"
"""Marks of thinking in the templates of Qwen3, DeepSeek, GLM and others."""


@dataclass(frozen=True, slots=True)
class Calls:
    """What stands behind the first mark of a call."""

    found: tuple[tuple[str, str], ...]
    """(function, JSON text of its arguments), in order."""
    rest: str = ""
    """Text beside them."""
    ill_formed: bool = False
    """Something was tried that cannot be read; it is in `rest`."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A whole answer."""

    text: str
    reasoning: str | None
    calls: tuple[tuple[str, str], ...]
    ill_formed: bool


class ToolFormat(ABC):
    """How a family of models writes calls."""

    name: ClassVar[str]
    marks: ClassVar[tuple[str, ...]]
    """Each begins a call; text from the first one on is read by `read`."""
    signs: ClassVar[tuple[str, ...]] = ()
    """All of them stand in the chat templates of the models that write it."""

    @abstractmethod
    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        """`text` begins with one of `marks`."""

    def call_id(self, name: str, number: int) -> str:
        """What a result names its call by. `number`: of the call in its conversation, from 0.

        Agents send it back, and templates of some families show it to the model.
        """
        return f"call_{secrets.token_hex(12)}"


FORMATS: Registry[ToolFormat] = Registry(
    "tool format", flag="tool_format", package="slime.agent.parsers", contract=ToolFormat
)


class Reader:
    """Reads one answer as it comes."""

    def __init__(self, format: ToolFormat, tools: Sequence[Any] = (), prompt_end: str = "") -> None:
        """`tools`: as chat templates read them; without any, nothing is a call. `prompt_end`: the text before the
        answer, which may have begun the thinking already.
        """
        self._format, self._tools = format, tools
        self._marks = format.marks if tools else ()
        self._thinks = prompt_end.rstrip().endswith(OPEN)
        self._begun, self._held = self._thinks, ""
        self._trims = self._thinks
        """Line feeds beside a mark of thinking belong to it."""
        self._thoughts: list[str] = []
        self._words: list[str] = []
        self._calls: list[str] | None = None
        self._blank: list[str] = []
        """White space before all else, which belongs to a mark of thinking if one follows."""

    def feed(self, text: str) -> list[tuple[str, str]]:
        """Parts ("thinking" | "text", text) that are certain now."""
        if self._calls is not None:
            self._calls.append(text)
            return []
        if not self._begun and not self._held and (not text or text.isspace()):
            self._blank.append(text)
            return []
        self._held = "".join([self._held, *self._blank, text])
        self._blank.clear()
        return self._out(last=False)

    def end(self) -> tuple[list[tuple[str, str]], Parsed]:
        """The parts that were held back, and all of it."""
        self._held += "".join(self._blank)
        parts = self._out(last=True)
        calls = Calls(())
        if self._calls is not None:
            calls = self._format.read("".join(self._calls), self._tools)
            if calls.rest:
                parts.append(self._say(calls.rest))
        text, thoughts = "".join(self._words), "".join(self._thoughts)
        return parts, Parsed(text, thoughts or None, calls.found, calls.ill_formed)

    def all(self, text: str) -> Parsed:
        """A whole answer."""
        self.feed(text)
        return self.end()[1]

    def _out(self, *, last: bool) -> list[tuple[str, str]]:
        parts: list[tuple[str, str]] = []
        if not self._begun and not self._opened(last):
            return parts
        if self._trims:
            self._held = self._held.lstrip("\n")
            self._trims = not self._held
        if self._thinks:
            at = self._held.find(CLOSE)
            keep = 0 if last else _begins(self._held, (CLOSE,))
            end = len(self._held) - keep if at < 0 else at
            if end:
                self._thoughts.append(self._held[:end])
                parts.append(("thinking", self._held[:end]))
            if at < 0:
                self._held = self._held[end:]
                return parts
            self._held, self._thinks = self._held[at + len(CLOSE) :].lstrip("\n"), False
            self._trims = not self._held
        return parts + self._text(last)

    def _opened(self, last: bool) -> bool:
        """Whether the beginning of the answer is certain: with a mark of thinking, or without."""
        start = self._held.lstrip()
        if start.startswith(OPEN):
            self._thinks, self._held = True, start[len(OPEN) :].lstrip("\n")
            self._trims = not self._held
        elif OPEN.startswith(start) and not last:
            return False
        self._begun = True
        return True

    def _text(self, last: bool) -> list[tuple[str, str]]:
        places = [at for mark in self._marks if (at := self._held.find(mark)) >= 0]
        keep = 0 if last else _begins(self._held, self._marks)
        end = min(places) if places else len(self._held) - keep
        parts = [self._say(self._held[:end])] if end else []
        self._held = self._held[end:]
        if places:
            self._calls, self._held = [self._held], ""
        return parts

    def _say(self, text: str) -> tuple[str, str]:
        self._words.append(text)
        return "text", text


def _begins(text: str, marks: Sequence[str]) -> int:
    """Characters at the end of a text that may be the beginning of a mark."""
    longest = max(map(len, marks), default=0)
    ends = (n for n in range(min(longest - 1, len(text)), 0, -1) if any(m.startswith(text[-n:]) for m in marks))
    return next(ends, 0)


def format_of(template: str) -> str | None:
    """The format whose signs a chat template has, the most of them; None if it has those of none."""
    fits = [entry for _, entry in FORMATS if entry.signs and all(sign in template for sign in entry.signs)]
    return max(fits, key=lambda entry: len(entry.signs)).name if fits else None
