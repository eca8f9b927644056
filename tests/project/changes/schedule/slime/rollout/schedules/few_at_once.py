"""A toy: as the schedule `step`, but with a few groups under way at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.rollout.schedules import SCHEDULES, RolloutSchedule
from slime.settings.fields import opt

if TYPE_CHECKING:
    from slime.buffer.data_buffer import DataBuffer
    from slime.core.sample import Group
    from slime.rollout.context import RolloutContext
    from slime.rollout.schedules.group_loop import GroupLoop
    from slime.rollout.types import RolloutFnTrainOutput


@SCHEDULES.register("few_at_once")
@dataclass(kw_only=True)
class FewAtOnce(RolloutSchedule):
    """A group starts when another has ended."""

    groups_at_once: int = opt(1, gt=0)
    """Groups that the schedule few_at_once has under way."""

    async def step(self, context: RolloutContext, rollout_id: int, source: DataBuffer) -> RolloutFnTrainOutput:
        """The batch of one step."""
        from slime.rollout.schedules.step import BatchPolicy, generate_step

        at_once = self.groups_at_once

        class Few(BatchPolicy):
            """Waits for what it started."""

            waits_for_all = True

            def num_missing(self, loop: GroupLoop) -> int:
                return min(at_once - len(loop.running), super().num_missing(loop))

            def was_meant(self, loop: GroupLoop, group: Group) -> bool:
                return False

        return await generate_step(context, rollout_id, source, Few(context, source))
