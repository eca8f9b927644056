"""Data sources: where prompts come from, behind the Data Buffer.

    @SOURCES.register("my_source")
    @dataclass(kw_only=True)
    class MySource(SampleSource):
        "What it serves."
        some_setting: float = 1.0
        "Its help text; the flag is --some-setting."
        def get_samples(self, num_samples): ...

One module of this package for each: `prompt_data` (the file of `--prompt-data`) and `user_class` (any class at
`--data-source-path`, which knows nothing of this package). `--data-source` names one, or the import path of a user's.

A source is opened once for a run, as a `DataBuffer`, which gives ids, keeps the ledger and remembers what is in flight.
`SampleSource` is all that most need: it has the methods of a class at `--data-source-path`, and settings of its own.
Modules of this package are imported for their settings, so they import what reads data inside functions only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from slime.core.registry import Registry
from slime.core.sample import Sample

if TYPE_CHECKING:
    from slime.buffer.data_buffer import DataBuffer
    from slime.settings import Args


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceContext:
    """The run that a source is opened for."""

    args: Args
    tokenizer: Any
    """Of `--hf-checkpoint`; None without one."""
    buffer_filter: Callable[..., list[list[Sample]]] | None = None
    """The function of `--buffer-filter-path`: fn(args, rollout_id, buffer, num_samples)."""


class DataSource(ABC):
    """One way of getting prompts; its fields are its settings."""

    name: ClassVar[str]
    reads_prompt_data: ClassVar[bool] = False
    """It cannot do without `--prompt-data`."""

    @abstractmethod
    def open(self, context: SourceContext) -> DataBuffer:
        """The buffer over this source. Called once for a run."""

    def check(self, args: Args) -> str | None:
        """What of the settings cannot work with it (got / because / do); None if nothing. Asked before the start."""
        return None


class SampleSource(DataSource):
    """A source that makes groups of samples itself, and takes back what is unfinished."""

    @abstractmethod
    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Exactly `num_samples` groups: lists of samples of one prompt. New ones may leave the ids None."""

    @abstractmethod
    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Takes groups back, partial work included; `get_samples` serves them again, their ids unchanged."""

    @abstractmethod
    def save(self, rollout_id: int) -> None:
        """Files its state under the step."""

    @abstractmethod
    def load(self, rollout_id: int | None = None) -> None:
        """Restores the state that was filed under the step."""

    @abstractmethod
    def __len__(self) -> int:
        """Prompts of one epoch."""

    def open(self, context: SourceContext) -> DataBuffer:
        """Itself behind the buffer. Raises `HookError` with `--buffer-filter-path`."""
        from slime.buffer.data_source import behind_buffer

        return behind_buffer(self, context.buffer_filter)


SOURCES: Registry[DataSource] = Registry(
    "data source", flag="--data-source", package="slime.buffer.sources", contract=DataSource
)
