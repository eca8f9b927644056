"""A rollout schedule of your own: every group that a step starts is finished, and the batch is the first of them.

    python train.py ... --rollout-schedule examples.own_schedule --over-sampling-batch-size 48

The built-in schedule `step` aborts what still runs when the batch is full; this one waits, so that no token is thrown
away or continued under other weights. Finished groups beyond the batch go back to the Data Buffer: with
`--max-weight-staleness` the next step trains them. It is a policy over the loop that the built-in schedules use, which
retries, filters and accounts for every group; a schedule with other needs may do without.
"""

from __future__ import annotations

import time

from slime.buffer.data_buffer import DataBuffer
from slime.core.sample import Group
from slime.rollout.client import REQUEST_SCOPE
from slime.rollout.context import RolloutContext
from slime.rollout.group_loop import GroupLoop
from slime.rollout.hooks import RolloutHooks
from slime.rollout.schedules import SCHEDULES, RolloutSchedule
from slime.rollout.schedules.step import BatchPolicy
from slime.rollout.types import RolloutFnTrainOutput


class WaitForAll(BatchPolicy):
    """Collects a batch as `step` does, but interrupts nothing."""

    def was_meant(self, loop: GroupLoop, group: Group) -> bool:
        """Whoever interrupted a group, it was not this schedule."""
        return False


@SCHEDULES.register("whole_rounds")
class WholeRounds(RolloutSchedule):
    """Waits for all that it starts."""

    async def step(self, context: RolloutContext, rollout_id: int, source: DataBuffer) -> RolloutFnTrainOutput:
        """The batch of one step."""
        policy = WaitForAll(context, source)
        loop = GroupLoop(context, RolloutHooks.load(context.args), source, policy)
        loop.begin_step(context, rollout_id)
        token, began = REQUEST_SCOPE.set(loop.scope), time.monotonic()
        try:
            while loop.running or not policy.is_full():
                await loop.turn(loop.time_left_s(began))
        except BaseException:
            await loop.abandon(accepted=policy.accepted)
            raise
        finally:
            REQUEST_SCOPE.reset(token)
        loop.end_quarantine()
        return await loop.hand_out(policy.accepted)
