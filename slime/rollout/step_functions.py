"""User functions of a whole step: `--rollout-function-path` and `--eval-function-path`, called and checked.

Waits for: the function, which is awaited if it is async and otherwise runs in a thread, as long as it, or what it
starts, makes progress (`--execution-timeout-s`).
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from slime.buffer.groups import flatten
from slime.core.errors import HookError
from slime.rollout.context import RolloutContext
from slime.rollout.hooks import in_thread, load
from slime.rollout.metrics import sample_metrics
from slime.rollout.supervise import supervised
from slime.rollout.types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.settings.hooks import is_async


async def rollout_by_function(context: RolloutContext, rollout_id: int, source: object) -> RolloutFnTrainOutput:
    """The groups that the function returns, with metrics of their samples. Raises `HookError`, and what it raises."""
    path = context.args.rollout_function_path
    output = await _call(path, "rollout", context, rollout_id, source, evaluation=False)
    if isinstance(output, list):
        output = RolloutFnTrainOutput(output)
    if not hasattr(output, "samples"):
        raise HookError(f"got {type(output).__name__} from {path}; a rollout function returns a RolloutFnTrainOutput")
    groups = [flatten(group) for group in output.samples]
    metrics = sample_metrics(context.args, groups)
    return RolloutFnTrainOutput(groups, {**metrics, **(output.metrics or {})})


async def evaluate_by_function(context: RolloutContext, rollout_id: int, source: object) -> RolloutFnEvalOutput:
    """What the function returns. Raises `HookError`, and what it raises."""
    path = context.args.eval_function_path
    assert path is not None, "an evaluation without --eval-function-path"
    output = await _call(path, "eval", context, rollout_id, source, evaluation=True)
    data = output if isinstance(output, dict) else getattr(output, "data", None)
    if not isinstance(data, dict) or not all(isinstance(one, dict) and "rewards" in one for one in data.values()):
        raise HookError(
            f"got {type(output).__name__} from {path}; an evaluation function returns a RolloutFnEvalOutput, or its "
            'data: {dataset: {"rewards": [...], "truncated": [...], "samples": [...]}}'
        )
    metrics = {f"eval/{name}": statistics.fmean(one["rewards"]) for name, one in data.items() if one["rewards"]}
    own = None if isinstance(output, dict) else output.metrics
    return RolloutFnEvalOutput(data, {**metrics, **(own or {})})


async def _call(
    path: str, kind: str, context: RolloutContext, rollout_id: int, source: object, *, evaluation: bool
) -> Any:
    function = load(path, kind)
    assert function is not None, f"no function behind {path}"
    given = (context.args, rollout_id, source)
    call = function if is_async(function) else partial(in_thread, function)
    limit_s = context.args.execution_timeout_s  # progress of an execution of the step is its own
    return await supervised(call(*given, evaluation=evaluation), what=path, limit_s=limit_s)
