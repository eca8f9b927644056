"""Data schemes: data sets with a name instead of a file, `--prompt-data NAME:REST` (and `--eval-prompt-data`).

    @SCHEMES.register("my_tasks")
    class MyTasks(DataScheme):
        "What its rows are."
        def count(self, rest): ...
        def rows(self, rest, *, held_out): ...

Each scheme is one module of this package: `reasoning_gym` (`rg:`). A slice counts rows as in a file: `NAME:REST@[a:b]`.
Command-line parsing imports the modules, so they import libraries for making rows only inside functions.

Invariants
1. The same name yields the same rows in every process, so that a data cursor in a checkpoint stays valid.
2. Training rows (`held_out` False) and held-out rows share no prompt, unless the name itself requests it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from slime.core.registry import Registry

INPUT, LABEL, METADATA, TOOLS = "input", "label", "metadata", "tools"
"""The columns of a row; `--input-key` and the like do not rename them."""


class DataScheme(ABC):
    """Rows made from a name. Methods raise `ConfigError` with what is wrong, why, and what to do."""

    name: ClassVar[str]
    grader: ClassVar[str | None] = None
    """The default grader of its rows."""

    @abstractmethod
    def count(self, rest: str) -> int:
        """Returns the number of rows, without making any. `rest`: the name after the colon, without a slice."""

    @abstractmethod
    def rows(self, rest: str, *, held_out: bool) -> Iterator[Mapping[str, Any]]:
        """Yields rows with `input` (text or messages), and optionally `label`, `metadata` and `tools`."""

    def makes_messages(self, rest: str) -> bool:
        """Returns whether prompts are messages, which need a chat template. Makes no rows."""
        return False

    def check(self, rest: str, *, held_out: bool) -> None:
        """Raises `ConfigError` for a name without rows. Called before any process starts."""
        next(self.rows(rest, held_out=held_out), None)


SCHEMES: Registry[DataScheme] = Registry(
    "data scheme", flag="--prompt-data", package="slime.data.schemes", contract=DataScheme
)
