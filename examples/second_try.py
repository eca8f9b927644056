"""A custom generate function: if the response has no number, the model gets a hint and tries once more.

    python train.py ... --custom-generate-function-path examples.second_try:generate

The hint is appended without log-probs, so it is context and is not trained. The default `generate` appends the model's
responses with the engine's ids, log-probs and weight versions.
"""

from __future__ import annotations

import re
from typing import Any

from slime.core.sample import Sample, Status
from slime.rollout.context import current
from slime.rollout.generate import generate as one_turn

HINT = "\nThat holds no number. The answer as a number:"


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generates one or two turns in one sample."""
    sample = await one_turn(args, sample, sampling_params)
    if sample.status is not Status.COMPLETED or re.search(r"\d", sample.response):
        return sample
    hint_ids = current().tokenizer.encode(HINT, add_special_tokens=False)
    sample.append_response_tokens(hint_ids, text=HINT)
    return await one_turn(args, sample, sampling_params)
