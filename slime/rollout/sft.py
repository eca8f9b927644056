"""Supervised fine-tuning as a rollout function: `--rollout-function-path slime.rollout.sft.generate_rollout`.

Takes groups of messages from the Data Buffer and turns each conversation into ids and a loss mask; no engine is asked.
A conversation that the chat template cannot mask faithfully is dropped with its reason, within a bound.
"""

from __future__ import annotations

import logging
from typing import Any

from slime.core.errors import DataError
from slime.core.sample import NOT_SAMPLED, Sample, Status
from slime.data.chat import ChatRenderer
from slime.data.sft import sft_tokens
from slime.rollout.context import current
from slime.rollout.types import RolloutFnTrainOutput

logger = logging.getLogger(__name__)

MAX_BAD_FACTOR = 4
"""Unusable conversations per wanted one after which the step gives up."""


def fill(sample: Sample, chat: ChatRenderer) -> Sample:
    """Writes ids and mask of the sample's messages into it; reward 0.0, no log-probs. Raises `DataError`."""
    if not isinstance(sample.prompt, list):
        raise DataError(
            f"sample {sample.index} has a text prompt; fine-tuning needs messages: give --input-key of a column with "
            "messages and leave --apply-chat-template out, the template is applied here"
        )
    row = sft_tokens(sample.prompt, chat, tools=sample.metadata.get("tools"))
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
    assert not evaluation, "fine-tuning has no evaluation of its own; set --eval-function-path"
    context = current()
    chat = ChatRenderer(context.tokenizer, kwargs=args.apply_chat_template_kwargs)
    groups: list[list[Sample]] = []
    bad: list[str] = []
    while len(groups) < args.rollout_batch_size:
        for group in data_source.get_groups(args.rollout_batch_size - len(groups)):
            try:
                groups.append([fill(sample, chat) for sample in group.samples])
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
