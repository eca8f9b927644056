"""Data schemes: data sets that have a name and no file, `--prompt-data NAME:REST` (and `--eval-prompt-data`).

    @SCHEMES.register("my_tasks")
    class MyTasks(DataScheme):
        "What its rows are."
        def count(self, rest): ...
        def rows(self, rest, *, held_out): ...

One module of this package each: `reasoning_gym` (`rg:`). A slice counts rows as in a file: `NAME:REST@[a:b]`. The
modules are imported to parse a command line, so they import what makes rows inside functions only.

Invariants
1. The same name gives the same rows, in every process: a data cursor in a checkpoint stays valid.
2. Rows to train (`held_out` False) and held-out rows share no prompt, unless the name itself asks for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from slime.core.registry import Registry

INPUT, LABEL, METADATA, TOOLS = "input", "label", "metadata", "tools"
"""The columns of a row; `--input-key` and the like do not rename them."""


class DataScheme(ABC):
    """Rows made from a name. Errors are `ConfigError` (got / because / do)."""

    name: ClassVar[str]
    grader: ClassVar[str | None] = None
    """The default grader of its rows."""

    @abstractmethod
    def count(self, rest: str) -> int:
        """Number of rows, without making any. `rest`: the name after the colon, without a slice."""

    @abstractmethod
    def rows(self, rest: str, *, held_out: bool) -> Iterator[Mapping[str, Any]]:
        """Rows with `input` (text or messages), and perhaps `label`, `metadata` and `tools`."""

    def makes_messages(self, rest: str) -> bool:
        """Whether prompts are messages, which need a chat template; answers without making rows."""
        return False

    def check(self, rest: str, *, held_out: bool) -> None:
        """Raises `ConfigError` for a name without rows. Called before any process starts."""
        next(self.rows(rest, held_out=held_out), None)


SCHEMES: Registry[DataScheme] = Registry(
    "data scheme", flag="--prompt-data", package="slime.data.schemes", contract=DataScheme
)
