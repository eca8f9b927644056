"""A toy: as the schedule `step`, but with a few groups under way at a time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.rollout.schedules import SCHEDULES, RolloutSchedule
from slime.settings.fields import opt

if TYPE_CHECKING:
    from slime.buffer.data_buffer import DataBuffer
    from slime.rollout.context import RolloutContext
    from slime.rollout.types import RolloutFnTrainOutput


@SCHEDULES.register("few_at_once")
@dataclass(kw_only=True)
class FewAtOnce(RolloutSchedule):
    """A group starts when another has ended."""

    groups_at_once: int = opt(1, gt=0)
    """Groups that the schedule few_at_once has under way."""

    async def step(self, context: RolloutContext, rollout_id: int, source: DataBuffer) -> RolloutFnTrainOutput:
        """The batch of one step."""
        from slime.rollout.client import REQUEST_SCOPE
        from slime.rollout.group_loop import GroupLoop
        from slime.rollout.hooks import RolloutHooks
        from slime.rollout.schedules.step import BatchPolicy

        at_once = self.groups_at_once

        class Few(BatchPolicy):
            """Interrupts nothing."""

            def __init__(self) -> None:
                super().__init__(context, source)
                self.round = at_once

            def has_room(self, loop: GroupLoop) -> bool:
                return len(loop.running) < at_once and super().has_room(loop)

        policy = Few()
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
        return await loop.hand_out(policy.accepted)
