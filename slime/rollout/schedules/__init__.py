"""Rollout schedules: when prompt groups start, and which finished ones make a step's batch.

    @SCHEDULES.register("my_schedule")
    class MySchedule(RolloutSchedule):
        "What it does."
        async def step(self, context, rollout_id, source): ...

Modules of this package: `step` (a step generates what it trains; also `function`, a user's or fine-tuning's rollout
function) and `fully_async` (a worker generates all the time). `--rollout-schedule` names a schedule, or the import path
of a user's. `slime.rollout.group_loop` is the loop of the first and the last; a new schedule may use it or not.

Invariants
1. Every group that a schedule takes from the source is in the batch, put back, marked filtered or marked failed. A
   `continuous` schedule may keep groups in flight between steps, until `close`. What another schedule leaves in flight
   beside its batch is marked filtered (`BatchAccount`).
2. After `close` no request of the schedule is left in an engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from slime.core.registry import Registry

if TYPE_CHECKING:
    from slime.buffer.data_buffer import DataBuffer
    from slime.rollout.context import RolloutContext
    from slime.rollout.types import RolloutFnTrainOutput
    from slime.settings import Args


class RolloutSchedule(ABC):
    """Made once per run, without arguments or from its fields, which are settings; used on one event loop."""

    name: ClassVar[str]
    continuous: ClassVar[bool] = False
    """It also generates between steps, while the trainer trains and weights are synced (`args.fully_async`)."""

    @abstractmethod
    async def step(self, context: RolloutContext, rollout_id: int, source: DataBuffer) -> RolloutFnTrainOutput:
        """The batch of one step, with metrics; its groups stay in flight. `source` is the same in every step."""

    async def pause(self, *, hand_back: bool) -> None:  # noqa: B027
        """Called between steps, before a weight sync: ends requests and sends no other until `resume`.

        They go on then, unless `hand_back`: a save follows, so their tokens go to the source. Only a `continuous`
        schedule has requests between steps.
        """

    def resume(self) -> None:  # noqa: B027
        """Called after the weight sync: requests go on."""

    async def close(self) -> None:  # noqa: B027
        """Ends what still runs and puts its groups back."""

    def check(self, args: Args) -> str | None:
        """A message (got / because / do) for settings that cannot work with it; None if they can. Asked at start."""
        return None


SCHEDULES: Registry[RolloutSchedule] = Registry(
    "rollout schedule", flag="--rollout-schedule", package="slime.rollout.schedules", contract=RolloutSchedule
)
