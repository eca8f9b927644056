"""Supervised fine-tuning as a rollout function: `--rollout-function-path slime.rollout.sft.generate_rollout`.

Takes groups of messages from the Data Buffer and turns each conversation into ids and a loss mask; no engine is asked.
A conversation that the chat template cannot mask faithfully is dropped with its reason, within a bound.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from slime.core.errors import DataError
from slime.core.sample import NOT_SAMPLED, Sample, Status
from slime.data.chat import ChatRenderer
from slime.data.sft import conversation_of, sft_tokens
from slime.rollout.clients import end_of_text
from slime.rollout.context import current
from slime.rollout.types import RolloutFnTrainOutput

logger = logging.getLogger(__name__)

MAX_BAD_FACTOR = 4
"""Unusable conversations per wanted one after which the step gives up."""


def renderer(hf_checkpoint: str, tokenizer: Any, kwargs: Mapping[str, Any] | None) -> ChatRenderer:
    """Knows the tokens at which engines of the checkpoint stop: with one of them a trained turn ends."""
    return ChatRenderer(tokenizer, kwargs=kwargs, end_ids=sorted(end_of_text(hf_checkpoint, tokenizer).token_ids))


def fill(sample: Sample, chat: ChatRenderer, *, rendered: bool = False) -> Sample:
    """Writes ids and mask of the sample's conversation into it; reward 0.0, no log-probs. Raises `DataError`.

    A conversation is a list of messages, or a text with a text as its label: one question and its answer. `rendered`:
    the chat template was applied to the prompt already, which is an error.
    """
    messages = conversation_of(sample.prompt, sample.label, rendered=rendered)
    if messages is None:
        raise DataError(
            f"sample {sample.index} has a text prompt; fine-tuning needs messages, or a text and its answer: give "
            "--input-key of a column with messages, or --label-key of the answers, and leave --apply-chat-template "
            "out, the template is applied here"
        )
    row = sft_tokens(messages, chat, tools=sample.metadata.get("tools"))
    sample.tokens = list(row.tokens)
    sample.loss_mask = list(row.loss_mask)
    sample.response_length = row.response_length
    sample.token_versions = [NOT_SAMPLED] * row.response_length
    sample.rollout_log_probs = None
    sample.reward = 0.0
    sample.status = Status.COMPLETED
    sample.validate()
    return sample


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """One step of conversations. Raises `DataError` if too many of them cannot be used."""
    assert not evaluation, "the trainer evaluates fine-tuning (`slime.rollout.held_out`)"
    context = current()
    chat = renderer(args.hf_checkpoint, context.tokenizer, args.apply_chat_template_kwargs)
    groups: list[list[Sample]] = []
    bad: list[str] = []
    while len(groups) < args.rollout_batch_size:
        for group in data_source.get_groups(args.rollout_batch_size - len(groups)):
            try:
                groups.append([fill(s, chat, rendered=args.apply_chat_template) for s in group.samples])
            except DataError as problem:
                logger.warning("group %d is dropped: %s", group.group_index, problem)
                data_source.mark_filtered([group.group_index], "unusable_conversation")
                bad.append(str(problem))
        if len(bad) > MAX_BAD_FACTOR * args.rollout_batch_size:
            raise DataError(f"got {len(bad)} unusable conversations and {len(groups)} usable; the last one: {bad[-1]}")
    lengths = [len(s.tokens) for group in groups for s in group]
    trained = [sum(s.loss_mask or ()) for group in groups for s in group]
    return RolloutFnTrainOutput(
        groups,
        {
            "rollout/total_len/mean": sum(lengths) / len(lengths),
            "rollout/trained_tokens": float(sum(trained)),
            "rollout/num_filtered_groups": float(len(bad)),
        },
    )
