"""The source of `--data-source-path`: any class with the methods of a source, built as `cls(args)`.

The class need not derive from anything in slime; one that wants settings of its own derives from `SampleSource` and is
named by `--data-source`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.buffer.sources import SOURCES, DataSource, SourceContext

if TYPE_CHECKING:
    from slime.buffer.data_buffer import DataBuffer
    from slime.settings import Args


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
