"""Data schemes: data sets that have a name and no file, `--prompt-data NAME:REST` (and `--eval-prompt-data`).

    @SCHEMES.register("my_tasks")
    class MyTasks(DataScheme):
        "What its rows are."
        def count(self, rest): ...
        def rows(self, rest, *, held_out): ...

One module of this package for each: `reasoning_gym` (`rg:`). A slice counts its rows as it does those of a file:
`NAME:REST@[a:b]`. Modules of this package are imported to parse a command line, so they import what makes rows inside
functions only.

Invariants
1. The same name gives the same rows, in every process: a data cursor in a checkpoint is valid for it.
2. What is trained (`held_out` False) and what is held out share no prompt, unless the name itself asks for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from slime.core.registry import Registry

INPUT, LABEL, METADATA, TOOLS = "input", "label", "metadata", "tools"
"""The columns of a row. The `--input-key` of a file does not rename them."""


class DataScheme(ABC):
    """Rows made from a name. Errors are `ConfigError`: what was got, because of what, and what to do."""

    name: ClassVar[str]
    grader: ClassVar[str | None] = None
    """The grader of its rows, where no other is asked for."""

    @abstractmethod
    def count(self, rest: str) -> int:
        """Number of rows, at once: nothing is made. `rest`: the name after the colon, without a slice."""

    @abstractmethod
    def rows(self, rest: str, *, held_out: bool) -> Iterator[Mapping[str, Any]]:
        """The rows: `input` (text or messages), and, as they have them, `label`, `metadata` and `tools`."""

    def makes_messages(self, rest: str) -> bool:
        """Whether the prompts are messages, at once: they need a chat template."""
        return False

    def check(self, rest: str, *, held_out: bool) -> None:
        """Raises `ConfigError` for a name that has no rows. Asked before any process of the run starts."""
        next(self.rows(rest, held_out=held_out), None)


SCHEMES: Registry[DataScheme] = Registry(
    "data scheme", flag="--prompt-data", package="slime.data.schemes", contract=DataScheme
)
