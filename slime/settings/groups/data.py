"""Settings for the prompt data: files, columns, chat template, and images in prompts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.core.files import is_code
from slime.core.hf_config import quantisation_of, read_hf_config
from slime.core.registry import load_object
from slime.core.text import slime_command
from slime.settings.conditions import estimator_of, fine_tunes
from slime.settings.fields import UNSET, Adjusted, Need, Passed, Rule, derived, opt
from slime.settings.groups.hooks import SFT_ROLLOUT
from slime.settings.schema import images_problem_of
from slime.settings.topology_yaml import topology_of

if TYPE_CHECKING:
    from slime.settings.args import Args

_RENDERS = Need(
    lambda s: s.apply_chat_template or fine_tunes(s) or s.rollout_function_path == SFT_ROLLOUT,
    "--apply-chat-template",
)

_BUILT_IN_SOURCE = "slime.rollout.data_source.RolloutDataSourceWithBuffer"
"""The public slime's name for the data source `prompt_data`."""
SOURCES = "slime.buffer.sources:SOURCES"
SAMPLERS = "slime.buffer.samplers:SAMPLERS"


def reads_prompt_data(s: Any) -> bool:
    """Returns whether the chosen data source needs `prompt_data`."""
    return bool(load_object(SOURCES).get(s.data_source).reads_prompt_data)


_PROMPT_DATA = Need(lambda s: reads_prompt_data(s) and s.prompt_data is not None, "--prompt-data")


def _no_dataset(value: Any, s: Any) -> Adjusted | None:
    off = value is not None and s.disable_rollout_global_dataset
    return Adjusted(None, "--disable-rollout-global-dataset") if off else None


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The prompt data, and how a row becomes a prompt."""

    prompt_data: str | None = opt(None, adjust=_no_dataset, first="Data")
    """A .jsonl or .parquet file, or a folder or quoted glob of such files, which are read in path order. Or a
    reasoning-gym task, rg:NAME?size=500&seed=1 (docs/data.md). The suffix @[a:b] selects a slice of all rows."""
    input_key: str = opt("input", first="Data")
    """Column of the prompt: text or a list of messages."""
    label_key: str | None = opt(None, first="Data")
    """Column of the reference answer."""
    metadata_key: str = "metadata"
    """Column with an arbitrary object, which graders and hooks read as sample.metadata."""
    tool_key: str = "tools"
    """Column of tool descriptions for the chat template."""
    apply_chat_template: bool = opt(False, first="Data")
    """Render the prompt with the tokenizer's chat template."""
    chat_template: str | None = opt(None, canonical=lambda file: file if file is None else os.path.abspath(file))
    """A .jinja file that replaces the tokenizer's chat template, for base models without one. Also used by engines and
    exports."""
    apply_chat_template_kwargs: dict[str, Any] = opt({}, needs=_RENDERS)
    """Arguments of the chat template, as a JSON object."""
    max_dropped_row_fraction: float = opt(0.05, ge=0, le=1)
    """Fraction of a dataset's rows that may be dropped because they are malformed or the chat template cannot render
    them, or, for fine-tuning, because they are too long, before the run fails. One row may always be dropped, unless
    this is 0. Applies to each dataset, including evaluation datasets."""
    data_source: str = derived(
        lambda s: "user_class" if s.data_source_path is not None else None,
        "--data-source-path",
        default="prompt_data",
        chosen_from=SOURCES,
    )
    """Source of prompts: a registered name, or the import path of your own class. Default: user_class with
    data_source_path, else prompt_data."""
    prompt_sampler: str = opt("epochs", chosen_from=SAMPLERS, needs=_PROMPT_DATA)
    """Chooses which row of the prompt data comes next: a registered name, or the import path of your own class."""
    task_key: str = "task"
    """Key of a row's task in its metadata, for prompt_sampler and the metrics of each task."""
    data_source_path: str | None = opt(
        None,
        canonical=lambda path: UNSET if path == _BUILT_IN_SOURCE else path,
        needs=Need(lambda s: s.data_source == "user_class", "--data-source user_class"),
    )
    """Import path of a class that replaces the built-in data source. --help hooks lists its methods."""


def chat_template_is_there(args: Args) -> str | None:
    """The file must end in .jinja, because engines recognise a template by that suffix."""
    file = args.chat_template
    if file is None or (file.endswith(".jinja") and os.path.isfile(file) and os.path.getsize(file)):
        return None
    wrong = "does not end in .jinja" if os.path.isfile(file) and os.path.getsize(file) else "is missing or empty"
    return f"chat_template {file} {wrong}; pass a Jinja template that ends in .jinja"


def tokenizer_is_no_code(args: Args) -> str | None:
    if args.debug_train_only or args.hf_checkpoint is None or not is_code(Path(args.hf_checkpoint)):
        return None
    return (
        f"the tokenizer of hf_checkpoint {args.hf_checkpoint} is code (auto_map in tokenizer_config.json), but slime "
        "does not run code from checkpoints; add a tokenizer.json to the folder, for Kimi-K2 with: "
        f"{slime_command('tokenizer')} {args.hf_checkpoint}"
    )


PASSED: tuple[Passed, ...] = (Passed("sglang", "chat_template", lambda s: s.chat_template, "--chat-template"),)
RULES: tuple[Rule, ...] = (chat_template_is_there, tokenizer_is_no_code)

# --- Images in prompts

KIND = "image"
"""The only supported kind of media."""
SLOW = "disable_fast_image_processor"
"""SGLang's switch for the image processor that the trainer uses."""


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """Images in prompts and in agents' conversations (docs/vision.md)."""

    multimodal_keys: dict[str, str] | None = opt(None)
    """Column of a prompt's images, as a JSON object: {"image": "images"}. The prompt contains <image> for each one.
    {}: no column, but agents' conversations have images. Only Qwen3-VL supports images, with a frozen vision tower
    (docs/vision.md)."""


def images_are_read(args: Args) -> str | None:
    keys = args.multimodal_keys
    if keys is None:
        return None
    if not set(keys) <= {KIND} or not all(isinstance(column, str) and column for column in keys.values()):
        return f'multimodal_keys is {keys}, but only images are supported; set \'{{"image": "COLUMN"}}\''
    if problem := images_problem_of(args.hf_checkpoint):
        return f"multimodal_keys does not work with hf_checkpoint {args.hf_checkpoint}: {problem}"
    if keys and not args.apply_chat_template and not fine_tunes(args) and args.custom_generate_function_path is None:
        return (
            "multimodal_keys needs --apply-chat-template, which puts images into prompts, or a generate function that "
            "renders them with current().chat; add the flag, or set --custom-generate-function-path"
        )
    return None


def images_go_with_the_rest(args: Args) -> str | None:
    """Refuses features that do not support images, or are not tested with them."""
    if args.multimodal_keys is None:
        return None
    wrong = list(_apart(args))
    return None if not wrong else f"multimodal_keys does not work with {wrong[0]}; drop one of the two"


def _apart(args: Args) -> Iterator[str]:
    if fine_tunes(args):
        yield "--loss-type sft_loss, which does not support images"
    if args.lora_rank is not None:
        yield "--lora-rank, which is not tested with images"
    if estimator_of(args).needs_critic:
        yield f"--advantage-estimator {args.advantage_estimator}, whose critic does not support images"
    if args.use_opd:
        yield "--use-opd, whose teacher does not support images"
    if quantisation_of(read_hf_config(args.hf_checkpoint)) is not None:
        yield "a quantised hf_checkpoint, which is not tested with images"
    if any(model.in_pairs for model in topology_of(args).models):
        yield "prefill and decode engines, which do not forward images"


def _slow(s: Any) -> bool | None:
    return None if s.multimodal_keys is None else True


IMAGE_PASSED: tuple[Passed, ...] = (Passed("sglang", SLOW, _slow, "--multimodal-keys: the trainer's processor"),)
IMAGE_RULES: tuple[Rule, ...] = (images_are_read, images_go_with_the_rest)
