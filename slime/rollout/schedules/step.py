"""The step schedule: starts groups until a batch is complete, then ends the groups that are still running.

The schedule issues as many groups as the batch still lacks, times `--over-sampling-batch-size` /
`--rollout-batch-size`, and returns exactly `--rollout-batch-size` groups. It waits for groups to end, within
`--rollout-global-timeout-s`.

Invariants
1. Once a step has returned or raised, none of its work is still running: each group is in the batch, put back, filtered
   or failed, and no request is left in an engine.
2. Without `--partial-rollout`, groups contain only work from this step: earlier work may come from older weights and is
   dropped when a group is issued. `--max-weight-staleness` keeps finished work that is recent enough.
3. Groups that the step itself ends do not count as failures.
"""

from __future__ import annotations

import asyncio
import time

from slime.buffer.data_buffer import DataBuffer
from slime.buffer.groups import GroupOrRecord
from slime.core.sample import Group
from slime.rollout.client.engine_client import REQUEST_SCOPE
from slime.rollout.context import RolloutContext, num_threads_asking, withdraw_from_threads
from slime.rollout.evaluate import rollout_by_function
from slime.rollout.execute import is_finished
from slime.rollout.schedules import SCHEDULES, RolloutSchedule
from slime.rollout.schedules.group_loop import GroupLoop, Policy
from slime.rollout.types import RolloutFnTrainOutput
from slime.rollout.user_functions import RolloutHooks
from slime.rollout.workers.episodes import Episodes, LocalEpisodes

ABORT_REPEAT_S = 0.5
"""An abort can overtake its request on the way to the engine, so aborts are repeated."""
ABORT_LIMIT_S = 30.0
"""After this time, tasks that are still running (tools, sandboxes) are cancelled."""


@SCHEDULES.register("step")
class StepByStep(RolloutSchedule):
    """Generates each batch in the step that trains on it."""

    async def step(self, context: RolloutContext, rollout_id: int, source: DataBuffer) -> RolloutFnTrainOutput:
        return await generate_step(context, rollout_id, source)


async def generate_step(
    context: RolloutContext, rollout_id: int, source: DataBuffer, batch: BatchPolicy | None = None
) -> RolloutFnTrainOutput:
    """Generates one batch. `batch`: the policy; None: a new `BatchPolicy`.

    Raises `DataError` if the filter rejects nearly everything, `EngineError` if too many groups fail,
    `DeadlineExceeded` after `--rollout-global-timeout-s`, and any error that a user hook raises deliberately.
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
    waits_for_all: bool = False
    """Whether to wait for groups that are still running when the batch is full; otherwise they are cancelled."""

    def __init__(self, context: RolloutContext, source: DataBuffer) -> None:
        self.accepted: list[GroupOrRecord] = []
        self.target = context.args.rollout_batch_size
        self._context, self._source = context, source
        self._issued: set[int] = set()

    def is_full(self) -> bool:
        return len(self.accepted) >= self.target

    def num_missing(self, loop: GroupLoop) -> int:
        """Returns how many groups the batch needs beyond the running ones, times the over-sampling ratio."""
        missing = self.target - len(self.accepted) - len(loop.running)
        return -(-missing * self._context.args.over_sampling_batch_size // self.target)  # rounded up

    def admit(self, loop: GroupLoop, group: Group) -> Group:
        """Drops work from an earlier step unless it may still be trained on."""
        args, first = self._context.args, group.group_index not in self._issued
        self._issued.add(group.group_index)
        worked_on = group.attempts > 0 and any(s.response_length for s in group.samples)
        may_be_older = args.max_weight_staleness is not None and is_finished(group.samples, scored=True)
        if not first or args.partial_rollout or may_be_older or not worked_on:
            return group
        loop.counts.num_reset += 1
        return self._source.start_over(group)

    def was_meant(self, loop: GroupLoop, group: Group) -> bool:
        """Returns whether the step is ending its surplus groups; any other interruption is a failure."""
        return loop.scope.aborted

    def is_surplus(self, loop: GroupLoop) -> bool:
        return self.is_full()

    def others_fill_the_step(self, loop: GroupLoop) -> bool:
        return len(self.accepted) + len(loop.running) >= self.target

    def accept(self, loop: GroupLoop, group: GroupOrRecord) -> None:
        self.accepted.append(group)
        self._context.progress.done = len(self.accepted)


async def _stop_surplus(loop: GroupLoop) -> None:
    """Aborts running groups and puts them back. With `--partial-rollout`, they keep their tokens."""
    deadline = time.monotonic() + ABORT_LIMIT_S
    while loop.running and time.monotonic() < deadline:
        loop.scope.aborted = True
        await loop.episodes.abort(loop.scope)
        done, _ = await asyncio.wait(loop.running, timeout=ABORT_REPEAT_S)
        await loop.settle(list(done))
    await loop.abandon(reason="aborted")


@SCHEDULES.register("function")
class FunctionSchedule(RolloutSchedule):
    """Calls the function of `--rollout-function-path` once per step.

    Groups that the function takes but neither returns nor puts back count as filtered (`BatchAccount`), unless a thread
    of the function generates on between its calls: then they are in flight. Requests of such a thread survive weight
    syncs.
    """

    def __init__(self) -> None:
        self._episodes: Episodes | None = None

    async def step(self, context: RolloutContext, rollout_id: int, source: DataBuffer) -> RolloutFnTrainOutput:
        self._episodes = context.workers or LocalEpisodes(context.client)
        return await rollout_by_function(context, rollout_id, source)

    @property
    def keeps_groups(self) -> bool:
        return num_threads_asking() > 0

    async def pause(self, *, hand_back: bool) -> None:
        if self._episodes is not None:
            await self._episodes.pause(None)

    def resume(self) -> None:
        if self._episodes is not None:
            self._episodes.resume()

    async def close(self) -> None:
        withdraw_from_threads()
