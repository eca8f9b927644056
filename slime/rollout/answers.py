"""What engines answered to a function that builds its sample by itself: it fills in what that function does not say.

A function that asks by `posting.post` gets an answer as SGLang words it, and writes tokens, mask and log-probs into its
sample. Weight versions, which every trained token needs, and routed experts come from here: tokens of the sample that
stand where an answer stood, behind the ids that its engine read, are those that were sampled.

Tasks inherit the list of an execution's answers through `ANSWERS`. Consumes answers, in any order; waits for nothing.

Invariants
1. A trained token without a version gets that of the answer of which it is, or the sample is refused: text that was
   encoded again, and ids that were made up, are not trained (law 1).
2. A log-prob that the function wrote is the engine's.
3. What already has versions stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from slime.core.errors import DataError
from slime.core.routed_experts import join
from slime.core.sample import NOT_SAMPLED, Sample
from slime.rollout.generation import Generation


@dataclass(frozen=True, slots=True)
class Answer:
    """One."""

    input_ids: list[int]
    """What the engine read."""
    generation: Generation


ANSWERS: ContextVar[list[Answer] | None] = ContextVar("slime_answers", default=None)


def remember(answer: Answer) -> None:
    """For the execution that asked; outside one nobody needs it."""
    answers = ANSWERS.get()
    if answers is not None:
        answers.append(answer)


def complete(sample: Sample, answers: Sequence[Answer]) -> None:
    """Writes what answers say of tokens that have no version. Raises `DataError` if invariant 1 or 2 cannot hold."""
    known = list(sample.token_versions or ())
    num, done = sample.response_length, len(known)
    if not answers or done >= num:
        return
    tokens, prompt_length = sample.tokens, sample.prompt_length
    versions = known + [NOT_SAMPLED] * (num - done)
    sampled_at: list[float | None] = [None] * num
    for answer in answers:
        begin = len(answer.input_ids)
        if begin < prompt_length or tokens[:begin] != answer.input_ids:
            continue
        generation = answer.generation
        same = 0
        sampled = zip(generation.tokens, generation.log_probs, generation.versions, strict=True)
        for token, log_prob, version in sampled:
            place = begin + same - prompt_length
            if place >= num or tokens[begin + same] != token:
                break
            same += 1
            if place >= done:
                versions[place], sampled_at[place] = version, log_prob
        if generation.routed_experts is not None and same == len(generation.tokens):
            sample.rollout_routed_experts = join(
                sample.rollout_routed_experts, generation.routed_experts, begin + len(generation.tokens)
            )
    _require_sampled(sample, sampled_at, done)
    sample.token_versions = versions
    if sample.rollout_log_probs is None:
        sample.rollout_log_probs = [0.0 if one is None else one for one in sampled_at]


def _require_sampled(sample: Sample, sampled_at: Sequence[float | None], done: int) -> None:
    mask = sample.loss_mask or [1] * sample.response_length
    said = sample.rollout_log_probs
    for place in range(done, min(len(mask), sample.response_length)):
        if not mask[place]:
            continue
        one = sampled_at[place]
        if one is None:
            raise DataError(
                f"got sample {sample.index} with response token {place} in the loss mask, which is in no answer of an "
                "engine to the ids before it, so it was not sampled there; send input_ids, take the ids of "
                "output_token_logprobs as they are, and mask what others say"
            )
        if said is not None and place < len(said) and not math.isclose(said[place], one, abs_tol=1e-6):
            raise DataError(
                f"got sample {sample.index} with log-prob {said[place]} for response token {place}, which the engine "
                f"sampled with {one}; keep those of output_token_logprobs"
            )
