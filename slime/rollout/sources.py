"""What the manager reads at the start: tokenizer, Data Buffer, evaluation datasets."""

from __future__ import annotations

from typing import Any

from slime.buffer.data_buffer import DataBuffer
from slime.buffer.data_source import build_data_buffer
from slime.data.dataset import PromptDataset, load_prompts
from slime.rollout.evaluate import EvalDataset
from slime.rollout.hooks import load
from slime.rollout.sampling import eval_sampling_params


def load_tokenizer(args: Any) -> Any:
    """The HF tokenizer of `--hf-checkpoint`; None if no checkpoint is given."""
    if not args.hf_checkpoint:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(args.hf_checkpoint)


def load_data_source(args: Any, tokenizer: Any) -> DataBuffer:
    """The Data Buffer over `--prompt-data` or the user's `--data-source-path`."""
    data_source = load(args.data_source_path, "data_source")
    return build_data_buffer(
        args,
        prompts=None if data_source is not None else load_prompts(args, tokenizer),
        data_source=data_source,
        buffer_filter=load(args.buffer_filter_path, "buffer_filter"),
    )


def load_eval_datasets(args: Any, tokenizer: Any) -> tuple[EvalDataset, ...]:
    """The datasets of `--eval-prompt-data NAME FILE ...`."""
    pairs = list(args.eval_prompt_data or ())
    return tuple(
        EvalDataset(
            name=name,
            rows=_rows(args, file, tokenizer),
            num_samples=args.n_samples_per_eval_prompt,
            sampling_params=eval_sampling_params(args),
        )
        for name, file in zip(pairs[0::2], pairs[1::2], strict=True)
    )


def _rows(args: Any, file: str, tokenizer: Any) -> Any:
    dataset = PromptDataset.load(
        file,
        tokenizer=tokenizer,
        input_key=args.eval_input_key,
        label_key=args.eval_label_key,
        metadata_key=args.metadata_key,
        tool_key=args.eval_tool_key,
        apply_chat_template=args.apply_chat_template,
        apply_chat_template_kwargs=args.apply_chat_template_kwargs,
        max_prompt_tokens=args.eval_max_prompt_len,
    )
    return [dataset[i] for i in range(len(dataset))]
