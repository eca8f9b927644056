"""Data schemes: datasets selected by name instead of by file, `--prompt-data NAME:REST` (also `--eval-prompt-data`).

    @SCHEMES.register("my_tasks")
    class MyTasks(DataScheme):
        "What the rows are."
        def count(self, rest): ...
        def rows(self, rest, *, held_out): ...

Each scheme is a module of this package: `reasoning_gym` (`rg:`). Slices work as for files: `NAME:REST@[a:b]`. Parsing
the command line imports these modules, so they import the libraries that generate rows only inside functions.

Invariants
1. The same name yields the same rows in every process, so the data cursor of a checkpoint stays valid.
2. Training rows (`held_out` False) and held-out rows have no prompt in common, unless the name asks for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from slime.core.registry import Registry

INPUT, LABEL, METADATA, TOOLS = "input", "label", "metadata", "tools"
"""Column names of every scheme; `--input-key` and similar flags do not apply."""


class DataScheme(ABC):
    """Generates rows from a name. All methods raise `ConfigError` for an invalid name."""

    name: ClassVar[str]
    grader: ClassVar[str | None] = None
    """The default grader for these rows."""

    @abstractmethod
    def count(self, rest: str) -> int:
        """Returns the number of rows without generating any. `rest` is the name after the colon, without the slice."""

    @abstractmethod
    def rows(self, rest: str, *, held_out: bool) -> Iterator[Mapping[str, Any]]:
        """Yields rows with `input` (text or messages) and optionally `label`, `metadata` and `tools`."""

    def makes_messages(self, rest: str) -> bool:
        """Returns whether the prompts are messages, which need a chat template. Generates no rows."""
        return False

    def check(self, rest: str, *, held_out: bool) -> None:
        """Raises `ConfigError` if the name yields no rows. Called before any process starts."""
        next(self.rows(rest, held_out=held_out), None)


SCHEMES: Registry[DataScheme] = Registry(
    "data scheme", flag="--prompt-data", package="slime.data.schemes", contract=DataScheme
)
