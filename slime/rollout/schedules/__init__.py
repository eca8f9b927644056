"""Rollout schedules decide when prompt groups start, and which finished groups form the batch of a step.

    @SCHEDULES.register("my_schedule")
    class MySchedule(RolloutSchedule):
        "What it does."
        async def step(self, context, rollout_id, source): ...

The module `step` registers `step`, which generates each batch in the step that trains on it, and `function`, which
calls the rollout function of a user or of SFT. The module `fully_async` generates continuously. `--rollout-schedule`
takes a registered name or an import path. `step` and `fully_async` share the loop in
`slime.rollout.schedules.group_loop`, which new schedules can use too.

Invariants
1. Every group that a schedule takes from the source ends up in the batch, is put back, or is marked filtered or failed.
   A `continuous` schedule may keep groups in flight between steps, until `close`. If any other schedule leaves groups
   in flight that are not in its batch, `BatchAccount` marks them filtered.
2. `close` leaves no request of the schedule in an engine.
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
    """A rollout schedule, built once per run from the settings that its fields declare. Runs on one event loop."""

    name: ClassVar[str]
    continuous: ClassVar[bool] = False
    """Whether generation continues while the trainer trains and syncs weights (`args.fully_async`)."""

    @property
    def keeps_groups(self) -> bool:
        """Whether groups that are not in a batch stay in flight between steps; otherwise they count as filtered."""
        return self.continuous

    @abstractmethod
    async def step(self, context: RolloutContext, rollout_id: int, source: DataBuffer) -> RolloutFnTrainOutput:
        """Returns the batch and metrics of one step. The groups stay in flight. `source` is the same in every step."""

    async def pause(self, *, hand_back: bool) -> None:  # noqa: B027
        """Ends requests and sends no more until `resume`. Called between steps, before a weight sync.

        `hand_back`: return the requests' tokens to the source, because a save follows; otherwise the requests continue
        at `resume`. Only a `continuous` schedule has requests between steps.
        """

    def resume(self) -> None:  # noqa: B027
        """Resumes requests. Called after the weight sync."""

    async def close(self) -> None:  # noqa: B027
        """Ends all running work and puts its groups back."""

    def check(self, args: Args) -> str | None:
        """Returns an error message (what is wrong, why, what to do) if the schedule is incompatible with the settings,
        else None.

        Called at startup.
        """
        return None


SCHEDULES: Registry[RolloutSchedule] = Registry(
    "rollout schedule", flag="--rollout-schedule", package="slime.rollout.schedules", contract=RolloutSchedule
)
