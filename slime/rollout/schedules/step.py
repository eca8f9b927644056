"""The step schedule: a step issues groups until enough of them are finished, and ends what is then still running.

Consumes: groups of the Data Buffer, as many as are missing of the batch, times `--over-sampling-batch-size` /
`--rollout-batch-size`. Produces: a batch of exactly `--rollout-batch-size` groups. Waits for: any of its groups to end.
Is woken by: the loop (`group_loop`), or the limit `--rollout-global-timeout-s`.

Invariants
1. When a step returns or raises, nothing of it runs: each group that it took is in the batch, put back, filtered or
   failed, and no request is left in an engine.
2. Without `--partial-rollout` a group holds work of this step only: what an earlier step left in it, finished or not,
   was sampled by weights that may be older, and is dropped when the group is issued. `--max-weight-staleness` keeps
   what is finished and not older than it says (the buffer looks).
3. What the step itself ends does not count as a failure.
"""

from __future__ import annotations

import asyncio
import time

from slime.buffer.data_buffer import DataBuffer
from slime.buffer.groups import Held
from slime.core.sample import Group
from slime.rollout.client.client import REQUEST_SCOPE
from slime.rollout.context import RolloutContext
from slime.rollout.evaluate import rollout_by_function
from slime.rollout.execute import is_finished
from slime.rollout.group_loop import GroupLoop, GroupSource, Policy
from slime.rollout.schedules import SCHEDULES, RolloutSchedule
from slime.rollout.types import RolloutFnTrainOutput
from slime.rollout.user_functions import RolloutHooks

ABORT_REPEAT_S = 0.5
"""An abort can overtake its request on the way to the engine, so it is repeated until all have ended."""
ABORT_LIMIT_S = 30.0
"""After this, tasks that still run (tools, sandboxes) are cancelled."""


@SCHEDULES.register("step")
class StepSchedule(RolloutSchedule):
    """Generates a batch in the step that trains it."""

    async def step(self, context: RolloutContext, rollout_id: int, source: DataBuffer) -> RolloutFnTrainOutput:
        """As `generate_step`."""
        return await generate_step(context, rollout_id, source)


async def generate_step(
    context: RolloutContext, rollout_id: int, source: GroupSource, batch: BatchPolicy | None = None
) -> RolloutFnTrainOutput:
    """Generates one batch, by the policy of this schedule unless another one is given.

    Raises `DataError` if the filter rejects nearly everything, `EngineError` if too many groups fail,
    `DeadlineExceeded` beyond `--rollout-global-timeout-s`, and what user hooks raise on purpose.
    """
    batch = batch or BatchPolicy(context, source)
    loop = GroupLoop(context, RolloutHooks.load(context.args), source, batch)
    loop.begin_step(context, rollout_id)
    token, began = REQUEST_SCOPE.set(loop.scope), time.monotonic()
    try:
        while not batch.is_full() or (batch.waits_for_all and loop.running):
            await loop.turn(loop.time_left_s(began))
        await _stop_surplus(loop)
    except BaseException:
        await loop.abandon(accepted=batch.accepted)
        raise
    finally:
        REQUEST_SCOPE.reset(token)
        await loop.episodes.drain()
    return await loop.hand_out(batch.accepted)


class BatchPolicy(Policy):
    """Collects one batch."""

    waits_for_all: bool = False
    """Whether what still runs when the batch is full is waited for; otherwise it is ended."""

    def __init__(self, context: RolloutContext, source: GroupSource) -> None:
        self.accepted: list[Held] = []
        self.target = context.args.rollout_batch_size
        self._context, self._source = context, source
        self._issued: set[int] = set()

    def is_full(self) -> bool:
        """Whether the batch is complete."""
        return len(self.accepted) >= self.target

    def num_missing(self, loop: GroupLoop) -> int:
        """What those under way leave of the batch, and surplus in proportion."""
        missing = self.target - len(self.accepted) - len(loop.running)
        return -(-missing * self._context.args.over_sampling_batch_size // self.target)  # rounded up

    def admit(self, loop: GroupLoop, group: Group) -> Group:
        """Without the work of an earlier step, unless that may be trained."""
        args, first = self._context.args, group.group_index not in self._issued
        self._issued.add(group.group_index)
        worked_on = group.attempts > 0 and any(s.response_length for s in group.samples)
        may_be_older = args.max_weight_staleness is not None and is_finished(group.samples, scored=True)
        if not first or args.partial_rollout or may_be_older or not worked_on:
            return group
        loop.counts.num_reset += 1
        return self._source.start_over(group)

    def was_meant(self, loop: GroupLoop, group: Group) -> bool:
        """The step itself ends what is surplus; whatever else interrupts a group is a failure."""
        return loop.scope.aborted

    def is_surplus(self, loop: GroupLoop) -> bool:
        """The batch is full."""
        return self.is_full()

    def others_fill_the_step(self, loop: GroupLoop) -> bool:
        """Accepted and running groups are a batch."""
        return len(self.accepted) + len(loop.running) >= self.target

    def accept(self, loop: GroupLoop, group: Held) -> None:
        """Keeps the group for the batch."""
        self.accepted.append(group)
        self._context.progress.done = len(self.accepted)


async def _stop_surplus(loop: GroupLoop) -> None:
    """Aborts what still runs and puts it back; a partial execution keeps its tokens with `--partial-rollout`."""
    deadline = time.monotonic() + ABORT_LIMIT_S
    while loop.running and time.monotonic() < deadline:
        loop.scope.aborted = True
        await loop.episodes.abort(loop.scope)
        done, _ = await asyncio.wait(loop.running, timeout=ABORT_REPEAT_S)
        await loop.settle(list(done))
    await loop.abandon(reason="aborted")


# The schedule of a function: each step is one call of `--rollout-function-path`, the user's or fine-tuning's.
#
# Consumes: what the function takes from the Data Buffer. Produces: the groups that it returns. Waits for: the function;
# nobody wakes it. What it took and neither returned nor gave back is counted as filtered (`batch_account`).


@SCHEDULES.register("function")
class FunctionSchedule(RolloutSchedule):
    """Calls a rollout function once for each step."""

    async def step(self, context: RolloutContext, rollout_id: int, source: DataBuffer) -> RolloutFnTrainOutput:
        """What the function returns."""
        return await rollout_by_function(context, rollout_id, source)
