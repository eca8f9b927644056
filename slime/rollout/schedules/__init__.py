"""Rollout schedules: when prompt groups are started, and which finished ones make a step's batch.

    @SCHEDULES.register("my_schedule")
    class MySchedule(RolloutSchedule):
        "What it does."
        async def step(self, context, rollout_id, source): ...

One module of this package for each: `step` (a step generates what it trains), `fully_async` (a worker generates all
the time) and `function` (the user's, or fine-tuning's, rollout function). `--rollout-schedule` names one, or the import
path of a user's. The first two are policies over one loop, `slime.rollout.group_loop`; a new one may use it or not.

Invariants
1. Every group that a schedule takes from the source is in the batch that it returns, or is put back, marked filtered or
   marked failed; one that is `continuous` may keep groups in flight between its steps, until `close`. What any other
   leaves in flight beside its batch is marked filtered (`batch_account`).
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
    """Made once for a run, without arguments or from the settings that are its fields; used on one event loop."""

    name: ClassVar[str]
    continuous: ClassVar[bool] = False
    """It generates between its steps too, while the trainer trains and weights are synced (`args.fully_async`)."""

    @abstractmethod
    async def step(self, context: RolloutContext, rollout_id: int, source: DataBuffer) -> RolloutFnTrainOutput:
        """The batch of one step, with the metrics of the rollout. The groups of the batch stay in flight.

        `context` is current while it runs. `source` is the same in every step.
        """

    async def pause(self, *, hand_back: bool) -> None:  # noqa: B027
        """Weights are about to be synced: ends the requests under way; no other is sent until `resume`.

        They go on by themselves then, unless `hand_back`: a save follows, and the source is to hold their tokens.
        Called between steps. A schedule that is not `continuous` has no request then.
        """

    def resume(self) -> None:  # noqa: B027
        """Weights are synced: requests go again."""

    async def close(self) -> None:  # noqa: B027
        """Ends what still runs and gives its groups back to the source."""

    def check(self, args: Args) -> str | None:
        """What of the settings cannot work with it (got / because / do); None if nothing. Asked before the start."""
        return None


SCHEDULES: Registry[RolloutSchedule] = Registry(
    "rollout schedule", flag="--rollout-schedule", package="slime.rollout.schedules", contract=RolloutSchedule
)
