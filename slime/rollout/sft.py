"""Supervised fine-tuning as a rollout function: `--rollout-function-path slime.rollout.sft.generate_rollout`.

Turns conversations from the Data Buffer into ids and loss masks, without an engine. A conversation that becomes several
samples stays one execution. A conversation is dropped with a reason if it is longer than `--rollout-max-context-len` or
if the chat template does not render it as the model would have written it.

Rendering takes milliseconds per row, too long to render a large dataset before the run starts. So as many rows as fit
into `CHECK_S` are rendered at startup, in a random order, and the run counts the ledger's dropped rows as it goes.
Both raise `DataError` if too many are dropped (`too_many_dropped`).
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime.buffer.data_buffer import DataBuffer
from slime.buffer.samplers import Prompts
from slime.core.batch import TrainBatch
from slime.core.errors import DataError
from slime.core.sample import NOT_SAMPLED, PromptRow, Sample, Status
from slime.data.chat import ChatRenderer
from slime.data.dataset import FLAG, Quarantined, dropped_row, first_rows_of, record_dropped, too_many_dropped
from slime.data.sft_loss_mask import conversation_of, sft_row
from slime.observability.logs import TELL_DRIVER
from slime.observability.samples import DROPPED_ROWS
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
CHECK_S = 10.0
"""Time to render rows of a dataset at startup, while the trainers load the model."""
UNUSABLE = "unusable_conversation"


class TooLongError(DataError):
    """A conversation is longer than the settings allow."""

    reason = "too_long_conversation"


def renderer(hf_checkpoint: str, tokenizer: Any, kwargs: Mapping[str, Any] | None) -> ChatRenderer:
    """Creates a renderer that ends trained turns with the checkpoint's end tokens."""
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
        extra=TELL_DRIVER,
    )


def too_many(dropped: Sequence[Quarantined], what: str, most: float) -> DataError:
    """Returns the error for a fraction of dropped rows above `most`. `what`: for example, "3 of the 10 rows"."""
    return DataError(
        f"{what} cannot be used for fine-tuning, but at most {100 * most:.4g} % may be dropped; correct the rows "
        f"({DROPPED_ROWS} in the run folder has the reasons), or allow more with {FLAG}. {first_rows_of(dropped)}"
    )


def check_rows(
    args: Args,
    chat: ChatRenderer,
    name: str | None,
    rows: Prompts | Sequence[PromptRow],
    *,
    rendered: bool,
    most: int | None,
    limit_s: float,
) -> None:
    """Renders rows in a random order for up to `limit_s`, before the run starts. Warns about the ones that will be
    dropped. Raises `DataError` if too many will be.

    `name`: the name of the evaluation dataset; None for the training data.
    """
    until_s = time.monotonic() + limit_s
    num_seen = 0
    bad: list[tuple[int, Quarantined]] = []
    for number in np.random.default_rng(0).permutation(len(rows)).tolist():
        num_seen += 1
        row = rows[number]
        sample = Sample(prompt=row.prompt, label=row.label, metadata=dict(row.metadata))
        try:
            fill(sample, chat, rendered=rendered, most=most)
        except DataError as problem:
            bad.append((number, dropped_row(row.source, str(problem))))
        if time.monotonic() > until_s:
            break
    dropped = [one for _, one in sorted(bad, key=lambda pair: pair[0])]
    record_dropped(args.run_dir, name, dropped)
    whose = "the training data" if name is None else f"held-out {name}"
    counts = f"{num_seen} rows" if num_seen == len(rows) else f"{num_seen} checked rows (of {len(rows)})"
    limit = args.max_dropped_row_fraction
    if too_many_dropped(len(dropped), num_seen, len(rows), limit):
        raise too_many(dropped, f"{len(dropped)} of the {counts} of {whose}", limit)
    if dropped:
        text = "%d of the %s of %s cannot be used for fine-tuning and will be dropped. %s"
        logger.warning(text, len(dropped), counts, whose, first_rows_of(dropped), extra=TELL_DRIVER)


def check_datasets(args: Args, tokenizer: Any, source: DataBuffer, datasets: Sequence[EvalDataset]) -> None:
    """Checks the conversations of a fine-tuning run with `check_rows`: training data and held-out data."""
    limit_s = CHECK_S / (1 + len(datasets))
    if source.prompts is not None:
        chat = renderer(args.hf_checkpoint, tokenizer, args.apply_chat_template_kwargs)
        rows, most = source.prompts, args.rollout_max_context_len
        check_rows(args, chat, None, rows, rendered=args.apply_chat_template, most=most, limit_s=limit_s)
    for one in datasets:
        config = one.config
        chat = renderer(args.hf_checkpoint, tokenizer, config.apply_chat_template_kwargs)
        rendered, most = config.apply_chat_template, config.max_context_len
        check_rows(args, chat, config.name, one.rows, rendered=rendered, most=most, limit_s=limit_s)


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """Returns the conversations of one step. Raises `DataError` if too many are unusable."""
    assert not evaluation, "the trainer evaluates fine-tuning (`slime.rollout.sft`)"
    context = current()
    chat = renderer(args.hf_checkpoint, context.tokenizer, args.apply_chat_template_kwargs)
    groups: list[list[Sample]] = []
    left_out: list[frozenset[str]] = []
    bad: list[Quarantined] = []
    while len(groups) < args.rollout_batch_size:
        for group in data_source.get_groups(args.rollout_batch_size - len(groups)):
            try:
                most = args.rollout_max_context_len
                filled = [fill(s, chat, rendered=args.apply_chat_template, most=most) for s in group.samples]
                groups.append([sample for samples, _ in filled for sample in samples])
                left_out += [what for _, what in filled]
            except DataError as problem:
                source = data_source.row_source(group.group_index) or f"group {group.group_index}"
                bad.append(dropped_row(source, str(problem)))
                logger.warning("dropping group %d: %s", group.group_index, bad[-1])
                is_long = isinstance(problem, TooLongError)
                data_source.mark_filtered([group.group_index], TooLongError.reason if is_long else UNUSABLE)
        num_dropped, num_seen = _num_dropped(args, data_source, bad)
        if len(bad) > MAX_BAD_FACTOR * args.rollout_batch_size:
            raise DataError(
                f"{len(bad)} conversations are unusable and only {len(groups)} are usable; last problem: {bad[-1]}"
            )
    if bad and num_dropped == len(bad):  # the first ones of the run
        text = "%d of the first %d rows cannot be used for fine-tuning and are dropped; such rows are counted in "
        text += "rollout/num_dropped_rows. %s"
        logger.warning(text, num_dropped, num_seen, first_rows_of(bad), extra=TELL_DRIVER)
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
            "rollout/num_dropped_rows": float(len(bad)),
            "rollout/dropped_row_fraction": num_dropped / num_seen,
            **{LEFT_OUT.format(what.replace(" ", "_")): float(num) for what, num in counted(left_out).items()},
        },
    )


def _num_dropped(args: Args, source: DataBuffer, bad: Sequence[Quarantined]) -> tuple[int, int]:
    """Returns (dropped rows, rows) that the run has seen, including before a resume. Raises `DataError` if too many are
    dropped. `bad`: the dropped rows of this step.
    """
    ledger = source.ledger()
    num_dropped = sum(ledger.filtered.get(reason, 0) for reason in (TooLongError.reason, UNUSABLE))
    num_seen = ledger.issued - ledger.buffered
    record_dropped(args.run_dir, None, bad)
    if bad and too_many_dropped(num_dropped, num_seen, len(source), args.max_dropped_row_fraction):
        what = f"{num_dropped} of the {num_seen} rows seen so far ({len(source)} in the dataset)"
        raise too_many(bad, what, args.max_dropped_row_fraction)
    return num_dropped, num_seen


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One held-out dataset as a batch, built the same way as a training batch."""

    name: str
    """Name of the dataset, whose loss is logged as `eval/<name>-loss`."""
    batch: TrainBatch
    num_unusable: int
    """Number of conversations that are too long, or that the chat template does not render as the model would have
    written them.
    """


def held_out_batches(args: Args, tokenizer: Any, datasets: Sequence[EvalDataset]) -> tuple[HeldOut, ...]:
    """Builds one batch per dataset. Raises `DataError` if a dataset has no usable row."""
    return tuple(_batch_of(args, tokenizer, dataset) for dataset in datasets)


def _batch_of(args: Args, tokenizer: Any, dataset: EvalDataset) -> HeldOut:
    config = dataset.config
    chat = renderer(args.hf_checkpoint, tokenizer, config.apply_chat_template_kwargs)
    good: list[list[Sample]] = []
    left_out: list[frozenset[str]] = []
    bad: list[Quarantined] = []
    samples = make_samples(dataset, 0)[:: config.n_samples_per_eval_prompt]
    for number, (sample, row) in enumerate(zip(samples, dataset.rows, strict=True)):
        sample.group_index = sample.index = number
        try:
            rendered, most = config.apply_chat_template, config.max_context_len
            filled, what = fill(sample, chat, rendered=rendered, most=most)
            good.append(filled)
            left_out.append(what)
        except DataError as problem:
            bad.append(dropped_row(row.source, str(problem)))
    if not good:
        raise DataError(
            f"none of the {len(bad)} conversations in held-out {config.name} is usable; last problem: {bad[-1]}"
        )
    counted(left_out)
    record_dropped(args.run_dir, config.name, bad)
    num, limit = len(dataset.rows), args.max_dropped_row_fraction
    if too_many_dropped(len(bad), num, num, limit):
        raise too_many(bad, f"{len(bad)} of the {num} rows of held-out {config.name}", limit)
    if bad:
        first = first_rows_of(bad)
        logger.warning("%s: skipping %d of %d rows. %s", config.name, len(bad), num, first, extra=TELL_DRIVER)
    return HeldOut(config.name, to_train_batch(args, -1, good), len(bad))
