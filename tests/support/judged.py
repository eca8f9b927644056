"""A generate function that asks a second model about every answer, as a user of several models would."""

from __future__ import annotations

from typing import Any

from slime.core.sample import Sample
from slime.rollout.context import current
from slime.rollout.generate import generate as one_turn


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The policy answers; the judge goes on from its first tokens, greedily, and that goes into the metadata."""
    sample = await one_turn(args, sample, sampling_params)
    greedily = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    verdict = await current().models["judge"].generate(sample.tokens[:3], greedily)
    sample.metadata = {
        **(sample.metadata or {}),
        "verdict": list(verdict.tokens),
        "version": verdict.weight_version,
        "router": list(args.sglang_model_routers["judge"]),
    }
    return sample
