"""What the manager reads at the start: tokenizer, Data Buffer, evaluation datasets."""

from __future__ import annotations

from typing import Any

from slime.buffer.data_buffer import DataBuffer
from slime.buffer.data_source import build_data_buffer
from slime.data.dataset import PromptDataset, load_prompts
from slime.rollout.evaluate import EvalDataset
from slime.rollout.hooks import load
from slime.settings import Args
from slime.settings.eval_config import EvalDatasetConfig, eval_datasets


def load_tokenizer(args: Args) -> Any:
    """The HF tokenizer of `--hf-checkpoint`; None if no checkpoint is given."""
    if not args.hf_checkpoint:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(args.hf_checkpoint)


def load_data_source(args: Args, tokenizer: Any) -> DataBuffer:
    """The Data Buffer over `--prompt-data` or the user's `--data-source-path`."""
    data_source = load(args.data_source_path, "data_source")
    return build_data_buffer(
        args,
        prompts=None
        if data_source is not None
        else load_prompts(args, tokenizer, max_prompt_tokens=args.rollout_max_prompt_len),
        data_source=data_source,
        buffer_filter=load(args.buffer_filter_path, "buffer_filter"),
    )


def load_eval_datasets(args: Args, tokenizer: Any) -> tuple[EvalDataset, ...]:
    """The datasets of `--eval-prompt-data` or `--eval-config`, read."""
    return tuple(EvalDataset(one, _rows(one, tokenizer)) for one in eval_datasets(args))


def _rows(one: EvalDatasetConfig, tokenizer: Any) -> Any:
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
    )
    return [dataset[i] for i in range(len(dataset))]
