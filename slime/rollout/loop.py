"""`generate_rollout`: the step schedule as a function that users can wrap. `run` runs a coroutine from such a wrapper.

--rollout-function-path slime.rollout.loop.generate_rollout         # the default
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine
from typing import Any, TypeVar

from slime.core.errors import HookError
from slime.rollout.context import RolloutContext, current, use
from slime.rollout.evaluate import evaluate
from slime.rollout.schedules.step import generate_step
from slime.rollout.types import RolloutFnEvalOutput, RolloutFnTrainOutput

LOOK_S = 5.0
"""How often (s) a waiting thread checks that the event loop is still running."""
Output = RolloutFnTrainOutput | RolloutFnEvalOutput
T = TypeVar("T")


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Output:
    """Generates or evaluates one step from a thread. Raises `HookError` if called on the manager's event loop."""
    context = current()
    if evaluation:
        return run_on_loop(evaluate(context, rollout_id), what="generate_rollout")
    return run_on_loop(generate_step(context, rollout_id, data_source), what="generate_rollout")


def run_on_loop(work: Coroutine[Any, Any, T], *, what: str) -> T:
    """Runs a coroutine on the rollout's event loop from another thread, and returns its result.

    Raises `HookError` if called on that event loop or outside a rollout, or if the loop has stopped.
    """
    context = current()
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is context.loop:
        work.close()
        raise HookError(f"{what} was called on the rollout's event loop; call it from a synchronous function")

    async def in_context() -> T:
        with use(context):
            return await work

    return _result(asyncio.run_coroutine_threadsafe(in_context(), context.loop), context, what)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Like `run_on_loop` inside a rollout, and like `asyncio.run` outside one."""
    try:
        current()
    except HookError:
        return asyncio.run(work)
    return run_on_loop(work, what="run")


def _result(step: concurrent.futures.Future[T], context: RolloutContext, what: str) -> T:
    """Waits for the result of a step, which enforces its own limits. Raises `HookError` if the event loop stops."""
    while True:
        try:
            return step.result(timeout=LOOK_S)
        except TimeoutError:
            if step.done():
                raise  # raised by the step itself
            if not context.loop.is_running():
                raise HookError(f"{what} waits for a stopped event loop; call it while the step is running") from None
