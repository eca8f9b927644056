"""The public name of the schedule `fully_async`, as a rollout function.

    --rollout-function-path slime.rollout.fully_async.generate_rollout_fully_async         # the same as --fully-async

The settings read the name alone. The worker (`schedules.fully_async`) lives for the whole run, so that no call of one
step could be it; evaluation is the same with every schedule, and may be called.
"""

from __future__ import annotations

from typing import Any

from slime.core.errors import HookError
from slime.rollout.loop import Output, generate_rollout
from slime.settings import Args


def generate_rollout_fully_async(args: Args, rollout_id: int, data_source: Any, evaluation: bool = False) -> Output:
    """Evaluates as `loop.generate_rollout`. Raises `HookError` for a step of training."""
    if evaluation:
        return generate_rollout(args, rollout_id, data_source, evaluation=True)
    raise HookError(
        f"got a call of generate_rollout_fully_async for step {rollout_id}, because your function wraps it and "
        "its worker outlives a step; do: pass --fully-async alone, or derive a schedule from "
        "slime.rollout.schedules.fully_async.FullyAsync and name it with --rollout-schedule"
    )
