"""Held-out conversations of a fine-tuning run as batches: ids and masks made as they are for training."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime.core.batch import TrainBatch
from slime.core.errors import DataError
from slime.core.sample import Sample
from slime.rollout.convert import to_train_batch
from slime.rollout.evaluate import EvalDataset, make_samples
from slime.rollout.sft import counted, fill, renderer
from slime.settings import Args

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One held-out dataset, for the trainer."""

    name: str
    """Of the dataset; metrics are `eval/<name>-loss`."""
    batch: TrainBatch
    num_unusable: int
    """Conversations that the chat template cannot write as the model would have, and those that are too long."""


def held_out_batches(args: Args, tokenizer: Any, datasets: Sequence[EvalDataset]) -> tuple[HeldOut, ...]:
    """A batch for each dataset. Raises `DataError` if none of its rows can be used."""
    return tuple(_batch_of(args, tokenizer, dataset) for dataset in datasets)


def _batch_of(args: Args, tokenizer: Any, dataset: EvalDataset) -> HeldOut:
    config = dataset.config
    chat = renderer(args.hf_checkpoint, tokenizer, config.apply_chat_template_kwargs)
    good: list[list[Sample]] = []
    left_out: list[frozenset[str]] = []
    bad: list[str] = []
    for number, sample in enumerate(make_samples(dataset, 0)[:: config.n_samples_per_eval_prompt]):
        sample.group_index = sample.index = number
        try:
            rendered, most = config.apply_chat_template, config.max_context_len
            samples, what = fill(sample, chat, rendered=rendered, most=most)
            good.append(samples)
            left_out.append(what)
        except DataError as problem:
            bad.append(str(problem))
    if not good:
        raise DataError(f"got no usable conversation of {len(bad)} in held-out {config.name}; the last one: {bad[-1]}")
    counted(left_out)
    if bad:
        counts = len(bad), len(dataset.rows)
        logger.warning("%s: %d conversations of %d are left out. First: %s", config.name, *counts, bad[0])
    return HeldOut(config.name, to_train_batch(args, -1, good), len(bad))
