"""The default rollout as a function of one step: the public name of the schedule `step`, for functions that wrap it.

    --rollout-function-path slime.rollout.loop.generate_rollout         # the default

Waits for: the step that it starts on the manager's event loop. Blocks its own thread meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from slime.core.errors import HookError
from slime.rollout.context import current, use
from slime.rollout.evaluate import evaluate
from slime.rollout.schedules.step import generate_step
from slime.rollout.types import RolloutFnEvalOutput, RolloutFnTrainOutput

Output = RolloutFnTrainOutput | RolloutFnEvalOutput


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Output:
    """Generates, or evaluates, one step. Raises `HookError` on the manager's own event loop."""
    context = current()
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is context.loop:
        raise HookError(
            "got generate_rollout called on the rollout's event loop; make the calling function synchronous"
        )

    async def in_context() -> Output:
        with use(context):
            if evaluation:
                return await evaluate(context, rollout_id)
            return await generate_step(context, rollout_id, data_source)

    work: Coroutine[Any, Any, Output] = in_context()
    return asyncio.run_coroutine_threadsafe(work, context.loop).result()
