"""A rollout schedule of your own: every group that a step starts is finished, and the batch is the first of them.

    python train.py ... --rollout-schedule examples.own_schedule --over-sampling-batch-size 48

The built-in schedule `step` aborts what still runs when the batch is full; this one waits, so that no token is thrown
away or continued under other weights. Finished groups beyond the batch go back to the Data Buffer: with
`--max-weight-staleness` the next step trains them. It is a policy over the loop that the built-in schedules use, which
retries, filters and accounts for every group; a schedule with other needs may do without.
"""

from __future__ import annotations

from slime.buffer.data_buffer import DataBuffer
from slime.core.sample import Group
from slime.rollout.context import RolloutContext
from slime.rollout.group_loop import GroupLoop
from slime.rollout.schedules import SCHEDULES, RolloutSchedule
from slime.rollout.schedules.step import BatchPolicy, generate_step
from slime.rollout.types import RolloutFnTrainOutput


class WaitForAll(BatchPolicy):
    """Collects a batch as `step` does, but interrupts nothing."""

    waits_for_all = True

    def was_meant(self, loop: GroupLoop, group: Group) -> bool:
        """Whoever interrupted a group, it was not this schedule."""
        return False


@SCHEDULES.register("whole_rounds")
class WholeRounds(RolloutSchedule):
    """Waits for all that it starts."""

    async def step(self, context: RolloutContext, rollout_id: int, source: DataBuffer) -> RolloutFnTrainOutput:
        """The batch of one step."""
        return await generate_step(context, rollout_id, source, WaitForAll(context, source))
