"""The source of most runs: the rows of `--prompt-data`, endlessly, epoch after epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.buffer.sources import SOURCES, DataSource, SourceContext

if TYPE_CHECKING:
    from slime.buffer.data_buffer import DataBuffer
    from slime.core.sample import Sample


@SOURCES.register("prompt_data")
class PromptData(DataSource):
    """A file of prompts. Without `--prompt-data` every prompt is blank: the rollout function makes its own."""

    reads_prompt_data = True

    def open(self, context: SourceContext) -> DataBuffer:
        """The buffer over the file, in the order that the settings ask for."""
        from slime.buffer.data_buffer import DataBuffer
        from slime.buffer.image_column import image_column
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
