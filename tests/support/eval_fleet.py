"""Generate functions of evaluations on an evaluation fleet, whose ends depend on what the training beside them does.

They show without a clock that both run at the same time: an evaluation that training waits for would never end.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from slime.core.sample import Sample
from slime.observability.sinks import read_jsonl
from slime.rollout.context import current
from slime.rollout.generate import generate

LOOK_EVERY_S = 0.2
BEGUN = "evaluation_begun"
"""File in the run folder that `never_ends` writes."""


async def after_the_next_step(args: Any, sample: Sample, params: dict[str, Any], evaluation: bool = False) -> Sample:
    """Generates once the step after the evaluated one is trained; at the end of the run there is none to wait for."""
    context = current()
    assert evaluation and context.on_eval_fleet and context.rollout_id is not None
    awaited = context.rollout_id + 1
    while awaited < args.num_rollout and not _is_trained(Path(args.run_dir), awaited):
        await asyncio.sleep(LOOK_EVERY_S)
    return await generate(args, sample, params)


async def never_ends(args: Any, sample: Sample, params: dict[str, Any], evaluation: bool = False) -> Sample:
    """Waits forever in the first evaluation. Samples in all others."""
    if current().rollout_id == -1:
        (Path(args.run_dir) / BEGUN).touch()
        await asyncio.Event().wait()
    return await generate(args, sample, params)


def _is_trained(run_dir: Path, step: int) -> bool:
    return any(row.get("train/step", -1) >= step for row in read_jsonl(run_dir / "metrics.jsonl"))
