"""The default rollout as a function of one step: the public name of the schedule `step`, for functions that wrap it.

    --rollout-function-path slime.rollout.loop.generate_rollout         # the default

Waits for: the step that it starts on the manager's event loop, as long as that lives. Blocks its own thread meanwhile.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine
from typing import Any

from slime.core.errors import HookError
from slime.rollout.context import RolloutContext, current, use
from slime.rollout.evaluate import evaluate
from slime.rollout.schedules.step import generate_step
from slime.rollout.types import RolloutFnEvalOutput, RolloutFnTrainOutput

LOOK_S = 5.0
"""How often a thread that waits for a step looks whether its event loop lives."""
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
    return _result(asyncio.run_coroutine_threadsafe(work, context.loop), context)


def _result(step: concurrent.futures.Future[Output], context: RolloutContext) -> Output:
    """Waits as long as the event loop lives, which has the limits of the step. Raises `HookError` if it does not."""
    while True:
        try:
            return step.result(timeout=LOOK_S)
        except TimeoutError:
            if step.done():
                raise  # its own
            if not context.loop.is_running():
                raise HookError(
                    "got generate_rollout without its event loop, which has ended; call it while the step runs"
                ) from None
