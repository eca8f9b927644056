"""The schedule of a function: each step is one call of `--rollout-function-path`, the user's or fine-tuning's.

Consumes: what the function takes from the Data Buffer. Produces: the groups that it returns. Waits for: the function;
nobody wakes it. What it took and neither returned nor gave back is counted as filtered (`batch_account`).
"""

from __future__ import annotations

from slime.buffer.data_buffer import DataBuffer
from slime.rollout.context import RolloutContext
from slime.rollout.schedules import SCHEDULES, RolloutSchedule
from slime.rollout.step_functions import rollout_by_function
from slime.rollout.types import RolloutFnTrainOutput


@SCHEDULES.register("function")
class FunctionSchedule(RolloutSchedule):
    """Calls a rollout function once for each step."""

    async def step(self, context: RolloutContext, rollout_id: int, source: DataBuffer) -> RolloutFnTrainOutput:
        """What the function returns."""
        return await rollout_by_function(context, rollout_id, source)
