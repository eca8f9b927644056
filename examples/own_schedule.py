"""Your own rollout schedule: a step finishes every group that it starts, and trains the first groups that finish.

    python train.py ... --rollout-schedule examples.own_schedule --over-sampling-batch-size 48

The built-in schedule `step` aborts running groups when the batch is full. This schedule waits, so no token is discarded
or continued under different weights. Surplus finished groups go back to the Data Buffer; with `--max-weight-staleness`,
the next step trains them. This schedule is a policy for the loop of the built-in schedules, which retries, filters and
accounts for every group. A schedule may also use its own loop.
"""

from __future__ import annotations

from slime.buffer.data_buffer import DataBuffer
from slime.core.sample import Group
from slime.rollout.context import RolloutContext
from slime.rollout.schedules import SCHEDULES, RolloutSchedule
from slime.rollout.schedules.group_loop import GroupLoop
from slime.rollout.schedules.step import BatchPolicy, generate_step
from slime.rollout.types import RolloutFnTrainOutput


class WaitForAll(BatchPolicy):
    """The policy of `step` without aborts: it waits for every group that is running."""

    waits_for_all = True

    def was_meant(self, loop: GroupLoop, group: Group) -> bool:
        """Returns False, because this schedule interrupts no group."""
        return False


@SCHEDULES.register("whole_rounds")
class WholeRounds(RolloutSchedule):
    """A schedule in which each step waits for all groups that it starts."""

    async def step(self, context: RolloutContext, rollout_id: int, source: DataBuffer) -> RolloutFnTrainOutput:
        """Generates the batch of one step."""
        return await generate_step(context, rollout_id, source, WaitForAll(context, source))
