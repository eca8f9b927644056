"""A custom generate function: the model answers; if its answer holds no number, it is told so and tries once more.

    python train.py ... --custom-generate-function-path examples.second_try:generate

What the environment says is appended without log-probs, so it is context and never trained. What the model says is
appended by the default `generate`, with the ids, log-probs and weight version of the engine.
"""

from __future__ import annotations

import re
from typing import Any

from slime.core.sample import Sample, Status
from slime.rollout.context import current
from slime.rollout.generate import generate as one_turn

HINT = "\nThat holds no number. The answer as a number:"


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One or two turns in one sample."""
    sample = await one_turn(args, sample, sampling_params)
    if sample.status is not Status.COMPLETED or re.search(r"\d", sample.response):
        return sample
    hint_ids = current().tokenizer.encode(HINT, add_special_tokens=False)
    sample.append_response_tokens(hint_ids, text=HINT)
    return await one_turn(args, sample, sampling_params)
