"""The built-in data sources: the rows of `--prompt-data`, and the user's class of `--data-source-path`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.buffer.sources import SOURCES, DataSource, SourceContext

if TYPE_CHECKING:
    from slime.buffer.data_buffer import DataBuffer
    from slime.core.sample import Sample
    from slime.settings import Args

# The source of most runs: the rows of `--prompt-data`, endlessly, epoch after epoch.


@SOURCES.register("prompt_data")
class PromptData(DataSource):
    """A file of prompts. Without `--prompt-data` every prompt is blank: the rollout function makes its own."""

    reads_prompt_data = True

    def open(self, context: SourceContext) -> DataBuffer:
        """The buffer over the file, in the order that the settings ask for."""
        from slime.buffer.data_buffer import DataBuffer
        from slime.buffer.prompts import image_column
        from slime.data.dataset import load_prompts

        args, hook = context.args, context.buffer_filter

        def chosen(buffer: list[list[Sample]], n: int) -> list[list[Sample]]:
            assert hook is not None, "a buffer without a filter asked it"
            return hook(args, None, buffer, n)

        return DataBuffer(
            load_prompts(
                args,
                context.tokenizer,
                max_prompt_tokens=args.rollout_max_prompt_len,
                images=image_column(args),
            ),
            n_samples_per_prompt=args.n_samples_per_prompt,
            shuffle=args.rollout_shuffle,
            seed=args.rollout_seed,
            buffer_filter=None if hook is None else chosen,
        )


# The source of `--data-source-path`: any class with the methods of a source, built as `cls(args)`.
#
# The class need not derive from anything in slime; one that wants settings of its own derives from `SampleSource` and
# is named by `--data-source`.


@SOURCES.register("user_class")
class UserClass(DataSource):
    """The user's class, behind the buffer."""

    def check(self, args: Args) -> str | None:
        """The class must be named."""
        if args.data_source_path is not None:
            return None
        return "got --data-source user_class without a class; give its path as --data-source-path"

    def open(self, context: SourceContext) -> DataBuffer:
        """Raises `HookError` if it is not such a class, or with `--buffer-filter-path`."""
        from slime.buffer.data_source import behind_buffer
        from slime.settings.hooks import load_hook

        path = context.args.data_source_path
        assert path is not None, "the settings require --data-source-path"
        return behind_buffer(load_hook(path, "data_source")(context.args), context.buffer_filter)
