"""A custom generate function that reads the response while it is sampled, and can end it early.

    python train.py ... --custom-generate-function-path examples.stop_early:generate

In this example, a response ends with a closed tool call. For a fixed string, `--rollout-stop` is enough; your own
function can parse the text. Closing the stream aborts the request in the engine. An interrupted response continues
where it stopped.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from slime.core.sample import Sample, Status
from slime.rollout.context import current
from slime.rollout.generate import prompt_ids, remaining_tokens

END = "</tool>"


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generates one response, and ends it at `END`."""
    sample.tokens = prompt_ids(sample, current().tokenizer)
    budget = remaining_tokens(args, sample, sampling_params["max_new_tokens"])
    if budget == 0:
        sample.status = Status.TRUNCATED
        return sample
    params = {**sampling_params, "max_new_tokens": budget}
    async with aclosing(current().engine().stream(sample.tokens, params, session_id=sample.session_id)) as parts:
        async for part in parts:
            sample.append_response_tokens(
                part.tokens,
                log_probs=part.log_probs,
                weight_version=part.weight_version,
                text=part.text,
                finish_reason=part.finish_reason,
                routed_experts=part.routed_experts,
            )
            if END in sample.response:
                sample.status = Status.COMPLETED
                break
    return sample
