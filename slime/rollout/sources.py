"""What the manager reads at the start: tokenizer, Data Buffer, evaluation datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime.buffer.data_buffer import DataBuffer
from slime.buffer.prompts import image_column
from slime.buffer.sources import SOURCES, SourceContext
from slime.data.dataset import PromptDataset
from slime.data.images import ImageColumn
from slime.rollout.evaluate import EvalDataset
from slime.rollout.hooks import load
from slime.settings import Args
from slime.settings.eval_config import EvalDatasetConfig, eval_datasets


def load_tokenizer(args: Args) -> Any:
    """The HF tokenizer of `--hf-checkpoint`, with `--chat-template`; None if no checkpoint is given."""
    if not args.hf_checkpoint:
        return None
    tokenizer = tokenizer_of(args.hf_checkpoint)
    if args.chat_template is not None:
        tokenizer.chat_template = Path(args.chat_template).read_text()
    return tokenizer


def tokenizer_of(path: str) -> Any:
    """The HF tokenizer of a checkpoint folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def load_data_source(args: Args, tokenizer: Any) -> DataBuffer:
    """The Data Buffer over the source that `--data-source` names."""
    context = SourceContext(
        args=args, tokenizer=tokenizer, buffer_filter=load(args.buffer_filter_path, "buffer_filter")
    )
    return SOURCES.build(args.data_source, args).open(context)


def load_eval_datasets(args: Args, tokenizer: Any) -> tuple[EvalDataset, ...]:
    """The datasets of `--eval-prompt-data` or `--eval-config`, read."""
    found, images = eval_datasets(args), image_column(args)
    return tuple(EvalDataset(one, _rows(one, tokenizer, images)) for one in found)


def _rows(one: EvalDatasetConfig, tokenizer: Any, images: ImageColumn | None) -> Any:
    dataset = PromptDataset.load(
        one.path,
        tokenizer=tokenizer,
        input_key=one.input_key,
        label_key=one.label_key,
        metadata_key=one.metadata_key,
        tool_key=one.tool_key,
        apply_chat_template=one.apply_chat_template,
        apply_chat_template_kwargs=one.apply_chat_template_kwargs,
        max_prompt_tokens=one.max_prompt_len,
        held_out=True,
        images=images,
    )
    return [dataset[i] for i in range(len(dataset))]
