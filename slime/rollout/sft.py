"""Supervised fine-tuning as a rollout function: `--rollout-function-path slime.rollout.sft.generate_rollout`.

Turns conversations from the Data Buffer into ids and loss masks, without an engine. A conversation that becomes several
samples stays one execution. A conversation is dropped with a reason, up to a limit, if it is longer than
`--rollout-max-context-len` or if the chat template does not render it as the model would have written it.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.core.batch import TrainBatch
from slime.core.errors import DataError
from slime.core.sample import NOT_SAMPLED, Sample, Status
from slime.data.chat import ChatRenderer
from slime.data.sft_loss_mask import conversation_of, sft_row
from slime.rollout.context import current
from slime.rollout.evaluate import EvalDataset, make_samples
from slime.rollout.factories import end_of_text
from slime.rollout.train_batch import to_train_batch
from slime.rollout.types import RolloutFnTrainOutput
from slime.settings import Args

logger = logging.getLogger(__name__)

LEFT_OUT = "rollout/num_rows_without_{}"
MAX_BAD_FACTOR = 4
"""A step fails after this many unusable conversations per conversation of the batch."""


class TooLongError(DataError):
    """A conversation is longer than the settings allow."""

    reason = "too_long_conversation"


def renderer(hf_checkpoint: str, tokenizer: Any, kwargs: Mapping[str, Any] | None) -> ChatRenderer:
    """Makes a renderer that ends trained turns with the checkpoint's end tokens."""
    return ChatRenderer(tokenizer, kwargs=kwargs, end_ids=sorted(end_of_text(hf_checkpoint, tokenizer).token_ids))


def fill(
    sample: Sample, chat: ChatRenderer, *, rendered: bool = False, most: int | None = None
) -> tuple[list[Sample], frozenset[str]]:
    """Returns the training samples of a conversation (reward 0.0, no log-probs), and the kinds of content that the
    template omits.

    A conversation is a list of messages, or a text question with its answer as the label. `rendered`: the chat template
    was already applied, which is an error. Raises `DataError`, or `TooLongError` beyond `most` tokens.
    """
    messages = conversation_of(sample.prompt, sample.label, rendered=rendered)
    if messages is None:
        raise DataError(
            f"sample {sample.index} has a text prompt, but SFT requires messages, or a text and its answer: set "
            "--input-key to a column with messages, or --label-key to a column with answers, and remove "
            "--apply-chat-template, because SFT applies the template itself"
        )
    row = sft_row(messages, chat, tools=sample.metadata.get("tools"))
    longest = max(len(made.tokens) for made in row.samples)
    if most is not None and longest > most:
        raise TooLongError(
            f"the conversation has {longest} tokens, more than {most} (rollout_max_context_len, or "
            "eval_max_context_len for held-out data), and truncating it would teach the model to stop "
            "mid-response; raise that limit, or shorten the row"
        )
    samples = [sample, *(sample.copy() for _ in row.samples[1:])]
    for one, made in zip(samples, row.samples, strict=True):
        one.tokens = list(made.tokens)
        one.loss_mask = list(made.loss_mask)
        one.response_length = made.response_length
        one.token_versions = [NOT_SAMPLED] * made.response_length
        one.rollout_log_probs = None
        one.reward = 0.0
        one.status = Status.COMPLETED
        one.validate()
    return samples, row.left_out


def counted(left_out: Iterable[frozenset[str]]) -> dict[str, int]:
    """Counts rows by the kind of content that the template omits, and logs each kind once."""
    found = Counter(what for one in left_out for what in sorted(one))
    for what in found:
        _warn(what)
    return dict(found)


@functools.cache
def _warn(what: str) -> None:
    logger.warning(
        "the chat template omits %s, so rows are trained without it (metric %s); to train on it, move it into the "
        "content, or set --chat-template FILE",
        what,
        LEFT_OUT.format(what.replace(" ", "_")),
    )


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """Returns the conversations of one step. Raises `DataError` if too many are unusable."""
    assert not evaluation, "the trainer evaluates fine-tuning (`slime.rollout.sft`)"
    context = current()
    chat = renderer(args.hf_checkpoint, context.tokenizer, args.apply_chat_template_kwargs)
    groups: list[list[Sample]] = []
    left_out: list[frozenset[str]] = []
    bad: list[str] = []
    while len(groups) < args.rollout_batch_size:
        for group in data_source.get_groups(args.rollout_batch_size - len(groups)):
            try:
                most = args.rollout_max_context_len
                filled = [fill(s, chat, rendered=args.apply_chat_template, most=most) for s in group.samples]
                groups.append([sample for samples, _ in filled for sample in samples])
                left_out += [what for _, what in filled]
            except DataError as problem:
                logger.warning("dropping group %d: %s", group.group_index, problem)
                is_long = isinstance(problem, TooLongError)
                reason = TooLongError.reason if is_long else "unusable_conversation"
                data_source.mark_filtered([group.group_index], reason)
                bad.append(str(problem))
        if len(bad) > MAX_BAD_FACTOR * args.rollout_batch_size:
            raise DataError(
                f"{len(bad)} conversations are unusable and only {len(groups)} are usable; last problem: {bad[-1]}"
            )
    lengths: Counter[tuple[int | None, int | None]] = Counter()
    for sample in (sample for group in groups for sample in group):
        lengths[sample.group_index, sample.index] += len(sample.tokens)
    trained = [sum(s.loss_mask or ()) for group in groups for s in group]
    return RolloutFnTrainOutput(
        groups,
        {
            "rollout/total_len/mean": sum(lengths.values()) / len(lengths),
            "rollout/trained_tokens": float(sum(trained)),
            "rollout/num_filtered_groups": float(len(bad)),
            **{LEFT_OUT.format(what.replace(" ", "_")): float(num) for what, num in counted(left_out).items()},
        },
    )


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One held-out dataset as a batch, built the same way as a training batch."""

    name: str
    """The loss is logged as `eval/<name>-loss`."""
    batch: TrainBatch
    num_unusable: int
    """Number of conversations that are too long, or that the chat template does not render as the model would have
    written them.
    """


def held_out_batches(args: Args, tokenizer: Any, datasets: Sequence[EvalDataset]) -> tuple[HeldOut, ...]:
    """Makes one batch per dataset. Raises `DataError` if a dataset has no usable row."""
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
        raise DataError(
            f"none of the {len(bad)} conversations in held-out {config.name} is usable; last problem: {bad[-1]}"
        )
    counted(left_out)
    if bad:
        counts = len(bad), len(dataset.rows)
        logger.warning("%s: skipping %d of %d conversations; first problem: %s", config.name, *counts, bad[0])
    return HeldOut(config.name, to_train_batch(args, -1, good), len(bad))
