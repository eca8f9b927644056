"""The prompt data: file, columns, chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.core.loading import load_object
from slime.settings.conditions import fine_tunes
from slime.settings.fields import Need, derived, opt
from slime.settings.groups.hooks import SFT_ROLLOUT

_RENDERS = Need(
    lambda s: s.apply_chat_template or fine_tunes(s) or s.rollout_function_path == SFT_ROLLOUT,
    "--apply-chat-template",
)

SOURCES = "slime.buffer.sources:SOURCES"
"""The registry of data sources, which stands above the settings."""


def reads_prompt_data(s: Any) -> bool:
    """Whether the source that was chosen cannot do without `prompt_data`."""
    return bool(load_object(SOURCES).get(s.data_source).reads_prompt_data)


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Which prompts, and how a row becomes one."""

    prompt_data: str | None = None
    """A .jsonl or .parquet file; a suffix @[a:b] takes a slice of its rows."""
    input_key: str = "input"
    """Column with the prompt: text or a list of messages."""
    label_key: str | None = None
    """Column with the reference answer."""
    metadata_key: str = "metadata"
    """Column with a free object that graders and hooks see as sample.metadata."""
    tool_key: str = "tools"
    """Column with tool descriptions for the chat template."""
    apply_chat_template: bool = False
    """Render the prompt with the tokenizer's chat template."""
    apply_chat_template_kwargs: dict[str, Any] = opt({}, needs=_RENDERS)
    """Arguments of the chat template, a JSON object."""
    data_source: str = derived(
        lambda s: "user_class" if s.data_source_path is not None else None,
        "--data-source-path",
        default="prompt_data",
        chosen_from=SOURCES,
    )
    """Where prompts come from: a registered source, or the import path of your own. Default: user_class with
    data_source_path, otherwise prompt_data."""
    data_source_path: str | None = opt(
        None, needs=Need(lambda s: s.data_source == "user_class", "--data-source user_class")
    )
    """Class to use in place of the Data Buffer's prompt source (its methods: --help hooks)."""
