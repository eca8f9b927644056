"""The default generation of one answer of a sample: one request, or the rest of an interrupted one.

A custom function (`--custom-generate-function-path`) has the same signature and may return several samples (a fan-out:
sub-agents, compaction), which share the execution's `index`.
"""

from __future__ import annotations

from typing import Any

from slime.core.errors import ConfigError, DataError
from slime.core.sample import Sample, Status
from slime.rollout.context import current
from slime.rollout.generation import before_stop
from slime.rollout.sampling import LIMITS, Limits, num_begun
from slime.rollout.transcript import Transcript
from slime.settings import Args


def prompt_ids(sample: Sample, tokenizer: Any) -> list[int]:
    """Ids of the prompt: the dataset's if it brought them, else the tokenizer's of the text, once.

    Chat templates write their own beginning-of-sequence token, so none is added. Messages are rendered by the dataset
    only, where control tokens in their text are disarmed. Raises `ConfigError` for messages, `DataError` without ids.
    """
    if sample.tokens:
        return list(sample.tokens)
    if tokenizer is None:
        raise DataError(f"sample {sample.index} has neither ids nor a tokenizer to make them; set --hf-checkpoint")
    if not isinstance(sample.prompt, str):
        raise ConfigError(
            f"got messages as prompt of sample {sample.index}, and nothing asks for a template; do: add "
            "--apply-chat-template, or render them in --custom-generate-function-path or --data-source-path"
        )
    return [int(i) for i in tokenizer.encode(sample.prompt, add_special_tokens=False)]


def remaining_tokens(args: Args, sample: Sample, max_new_tokens: int) -> int:
    """How many tokens the next request of the sample may have sampled; never negative.

    `max_new_tokens`: of one answer. What an interrupted sample has of it already counts, and so do the limits of the
    conversation and of the whole execution.
    """
    limits = LIMITS.get() or Limits.of(args, Transcript.behind(sample))
    return limits.next_answer(max_new_tokens, len(sample.tokens), num_begun(sample))


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generates the next answer of `sample`, or the rest of one, in place. Raises what `EngineClient.generate` raises.

    `max_new_tokens` is of this answer; a sample that may get no token is TRUNCATED.
    """
    context = current()
    sample.tokens = prompt_ids(sample, context.tokenizer)
    budget = remaining_tokens(args, sample, sampling_params["max_new_tokens"])
    if budget == 0:
        sample.status = Status.TRUNCATED
        return sample
    params = {**sampling_params, "max_new_tokens": budget}
    if "min_new_tokens" in params:
        params["min_new_tokens"] = max(0, min(params["min_new_tokens"] - num_begun(sample), budget))
    known = 0 if sample.rollout_routed_experts is None else sample.rollout_routed_experts.end
    seen: dict[str, Any] = {"pictures": context.pictures(sample.images)} if sample.images else {}
    generation = await context.engine().generate(
        sample.tokens, params, session_id=sample.session_id, experts_from=known, returns_partial=True, **seen
    )
    if generation.finish_reason == "abort" and params.get("stop") and context.tokenizer is not None:
        generation = before_stop(generation, params["stop"], context.tokenizer)
    sample.append_response_tokens(
        generation.tokens,
        log_probs=generation.log_probs,
        weight_version=generation.weight_version,
        text=generation.text,
        finish_reason=generation.finish_reason,
        routed_experts=generation.routed_experts,
    )
    return sample
