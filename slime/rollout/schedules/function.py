"""The schedule of a function: each step is one call of `--rollout-function-path`, the user's or fine-tuning's.

Consumes: what the function takes from the Data Buffer. Produces: the groups that it returns. Waits for: the function,
which runs in a thread unless it is async. What it took and neither returned nor gave back is counted as filtered
(`batch_account`).
"""

from __future__ import annotations

from slime.buffer.data_buffer import DataBuffer
from slime.buffer.groups import flatten
from slime.core.errors import HookError
from slime.rollout.context import RolloutContext
from slime.rollout.hooks import call_step_function
from slime.rollout.metrics import sample_metrics
from slime.rollout.schedules import SCHEDULES, RolloutSchedule
from slime.rollout.types import RolloutFnTrainOutput


@SCHEDULES.register("function")
class FunctionSchedule(RolloutSchedule):
    """Calls a rollout function once for each step."""

    async def step(self, context: RolloutContext, rollout_id: int, source: DataBuffer) -> RolloutFnTrainOutput:
        """What the function returns, with the metrics of its samples. Raises `HookError`, and what it raises."""
        path = context.args.rollout_function_path
        output = await call_step_function(path, "rollout", context.args, rollout_id, source)
        if isinstance(output, list):
            output = RolloutFnTrainOutput(output)
        if not hasattr(output, "samples"):
            raise HookError(
                f"got {type(output).__name__} from {path}; a rollout function returns a RolloutFnTrainOutput"
            )
        groups = [flatten(group) for group in output.samples]
        own = sample_metrics(context.args.reward_key, groups)
        return RolloutFnTrainOutput(groups, {**own, **(output.metrics or {})})
