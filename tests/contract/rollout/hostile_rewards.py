"""A generate function whose answers make their rewards misbehave, for whole steps; named by path in the tests."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

from slime.core.sample import Sample
from slime.rollout.generate import generate as default_generate

ACTS: dict[int, str] = {}
"""Execution id -> what happens to its reward; the test fills it."""
GIANT: list[str] = []
"""One string of 1 GB, made by the test before it measures anything."""
REWARD = f"{Path(__file__).parents[2] / 'unit' / 'rewards' / 'hostile.py'}:act"
RATES = {"hang": 0.05, "raise": 0.05, "none": 0.05, "nan": 0.05}


def plan(first_index: int, num_executions: int, per_group: int) -> dict[int, str]:
    """5 % of each act, one box that cannot be computed, one response and one reward of 1 GB; the same in every run.

    At most half of a group misbehaves.
    """
    acts = [act for act, rate in RATES.items() for _ in range(round(rate * num_executions))]
    acts += ["boxed", "giant response", "giant"]
    shuffled = random.Random(2).sample(range(first_index, first_index + num_executions), num_executions)
    chosen: list[int] = []
    in_group: Counter[int] = Counter()
    for index in shuffled:
        in_group[index // per_group] += 1
        if in_group[index // per_group] <= per_group // 2:
            chosen.append(index)
    return dict(zip(chosen, acts, strict=False))


GATE: list[str] = []
"""The file that the test makes when all is generated; with it no reward comes before."""


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Samples, then answers rightly in every second execution, or as `ACTS` says."""
    await default_generate(args, sample, sampling_params)
    act = ACTS.get(sample.index or 0)
    right = int(sample.label) + (sample.index or 0) % 2
    sample.response = f"so \\boxed{{{right}}}"
    if act == "boxed":
        sample.response, sample.metadata["rm_type"] = "so \\boxed{9**9**9}", "math"
    elif act == "giant response":
        sample.response = GIANT[0]
    elif GATE:
        sample.response, sample.custom_rm_path, sample.metadata["gate"] = "gate", REWARD, GATE[0]
    elif act is not None:
        sample.response, sample.custom_rm_path = act, REWARD
    return sample
