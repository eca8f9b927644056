"""Data sources: where the Data Buffer gets its prompts.

    @SOURCES.register("my_source")
    @dataclass(kw_only=True)
    class MySource(SampleSource):
        "What it serves."
        some_setting: float = 1.0
        "Its help text; the flag is --some-setting."
        def get_samples(self, num_samples): ...

`--data-source` is a registered name or the import path of a user's source. This module defines `prompt_data` (the file
at `--prompt-data`) and `user_class` (any class at `--data-source-path`); other sources are modules of this package. A
run opens its source once, as a `DataBuffer`, which assigns ids, keeps the ledger and tracks the groups in flight. Most
sources only need to implement `SampleSource`: the methods of a `--data-source-path` class, plus settings of their own.
The settings import this package, so code that reads data is imported only inside functions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from slime.core.registry import Registry
from slime.core.sample import Sample

if TYPE_CHECKING:
    from slime.buffer.data_buffer import DataBuffer
    from slime.data.images import ImageColumn
    from slime.settings import Args


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceContext:
    """The run that opens a source."""

    args: Args
    tokenizer: Any
    """The tokenizer of `--hf-checkpoint`; None without one."""
    buffer_filter: Callable[..., list[list[Sample]]] | None = None
    """The `--buffer-filter-path` function: fn(args, rollout_id, buffer, num_samples)."""


class DataSource(ABC):
    """A source of prompts. Its fields are its settings."""

    name: ClassVar[str]
    reads_prompt_data: ClassVar[bool] = False
    """Whether the source needs `--prompt-data`."""

    @abstractmethod
    def open(self, context: SourceContext) -> DataBuffer:
        """Creates the buffer for this source. Called once per run."""

    def check(self, args: Args) -> str | None:
        """Returns an error message if the settings are invalid, else None. Called before the run starts."""
        return None


class SampleSource(DataSource):
    """A source that produces groups of samples itself and takes unfinished ones back."""

    @abstractmethod
    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Returns exactly `num_samples` groups, each the samples of one prompt. New groups may have None as ids."""

    @abstractmethod
    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Takes back groups with partial work. `get_samples` must return them again with the same ids."""

    @abstractmethod
    def save(self, rollout_id: int) -> None:
        """Saves the state of the source for this step."""

    @abstractmethod
    def load(self, rollout_id: int | None = None) -> None:
        """Restores the state that was saved for this step."""

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of prompts per epoch."""

    def open(self, context: SourceContext) -> DataBuffer:
        """Raises `HookError` with `--buffer-filter-path`, unless the source filters its own buffer."""
        from slime.buffer.data_source import behind_buffer

        return behind_buffer(self, context.buffer_filter)


SOURCES: Registry[DataSource] = Registry(
    "data source", flag="--data-source", package="slime.buffer.sources", contract=DataSource
)


@SOURCES.register("prompt_data")
class PromptData(DataSource):
    """Prompts from a file, epoch after epoch. Without a file, prompts are blank and the rollout function fills them."""

    reads_prompt_data = True

    def open(self, context: SourceContext) -> DataBuffer:
        from slime.buffer.data_buffer import DataBuffer
        from slime.buffer.samplers import SAMPLERS
        from slime.data.dataset import load_prompts
        from slime.data.first_rows import grader_of_prompts
        from slime.settings import for_hook

        args, hook = context.args, context.buffer_filter

        def chosen(buffer: list[list[Sample]], n: int) -> list[list[Sample]]:
            assert hook is not None, "called only if there is a buffer filter"
            return hook(for_hook(args), None, buffer, n)

        return DataBuffer(
            load_prompts(
                args,
                context.tokenizer,
                max_prompt_tokens=args.rollout_max_prompt_len,
                images=image_column(args),
                grader=grader_of_prompts(args),
            ),
            n_samples_per_prompt=args.n_samples_per_prompt,
            shuffle=args.rollout_shuffle,
            seed=args.rollout_seed,
            buffer_filter=None if hook is None else chosen,
            sampler=SAMPLERS.build(args.prompt_sampler, args),
            task_key=args.task_key,
        )


def image_column(args: Args) -> ImageColumn | None:
    """Returns the column of `--multimodal-keys`; None if there is none. Raises `ConfigError` if the model takes no
    images.
    """
    if not args.multimodal_keys:
        return None
    from slime.core.files import ImageFolder
    from slime.core.hf_config import read_hf_config
    from slime.data.images import ImageColumn
    from slime.models import family_of
    from slime.settings.groups.data import KIND

    config, folder = read_hf_config(args.hf_checkpoint), Path(args.hf_checkpoint)
    kept = ImageFolder.of_run(args.run_dir)
    return ImageColumn(args.multimodal_keys[KIND], family_of(config).images(config, folder), kept)


@SOURCES.register("user_class")
class UserClass(DataSource):
    """A class with the methods of `SampleSource`, created as `cls(args)`. It need not derive from a slime class."""

    def check(self, args: Args) -> str | None:
        if args.data_source_path is not None:
            return None
        return "--data-source user_class needs a class; set --data-source-path to its import path"

    def open(self, context: SourceContext) -> DataBuffer:
        """Raises `HookError` if a method of the class is missing, or for a `--buffer-filter-path` without effect."""
        from slime.buffer.data_source import behind_buffer
        from slime.settings import for_hook, load_hook

        path = context.args.data_source_path
        assert path is not None, "the settings require --data-source-path"
        return behind_buffer(load_hook(path, "data_source")(for_hook(context.args)), context.buffer_filter)
