"""The schedule of `--fully-async`: a worker generates during the whole run, even while the trainer trains.

Finished groups wait in the Data Buffer; `step` takes a batch of them, oldest weights first. The worker sleeps until a
group ends or a batch is taken, which frees slots. `step` waits for a full batch; the worker wakes `step` when a batch
is full or when the worker has failed. Everything runs on the manager's event loop.

Invariants
1. At most `--max-groups-in-flight` groups are running or finished and waiting. The worker idles only when finished
   groups alone reach that limit.
2. Requests survive weight syncs. With `--pause-generation-mode abort`, the client ends each request and sends it again
   with its tokens when engines serve the new weights. If the sync before a checkpoint interrupts a group, the group
   goes back to the buffer, so that the checkpoint contains its tokens, and is reissued immediately. A group that is
   interrupted `MAX_TRIES` times in one step counts as failed.
3. A batch has no token older than `--max-weight-staleness`: the buffer checks a group when it is issued and when it is
   taken. No group starves: while the trainer waits for a batch, it does not sync weights, so running groups can finish
   in time.
4. If the worker fails, its groups are put back, and the current or next step raises its error.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter

from slime.buffer.data_buffer import DataBuffer
from slime.buffer.groups import GroupOrRecord, GroupRecord
from slime.core.sample import Group
from slime.rollout.client.engine_client import REQUEST_SCOPE, RequestScope
from slime.rollout.context import RolloutContext
from slime.rollout.guard import END_LIMIT_S, end_tasks
from slime.rollout.schedules import SCHEDULES, RolloutSchedule
from slime.rollout.schedules.group_loop import MAX_TRIES, GroupLoop, Policy, StepCounts
from slime.rollout.types import RolloutFnTrainOutput
from slime.rollout.user_functions import RolloutHooks


@SCHEDULES.register("fully_async")
class FullyAsync(RolloutSchedule):
    """Generates continuously. Each step trains on the finished groups with the oldest weights."""

    continuous = True

    def __init__(self) -> None:
        self._worker: RolloutWorker | None = None

    async def step(self, context: RolloutContext, rollout_id: int, source: DataBuffer) -> RolloutFnTrainOutput:
        """Returns the next batch. The first call starts the worker."""
        self._worker = self._worker or RolloutWorker(context, source)
        return await self._worker.step(context, rollout_id)

    async def pause(self, *, hand_back: bool) -> None:
        if self._worker is not None:
            await self._worker.pause(hand_back=hand_back)

    def resume(self) -> None:
        if self._worker is not None:
            self._worker.resume()

    async def close(self) -> None:
        if self._worker is not None:
            await self._worker.close()


class BoundedPolicy(Policy):
    """Limits how many groups are running or wait in the buffer after finishing."""

    def __init__(self, context: RolloutContext, buffer: DataBuffer) -> None:
        most = context.args.max_groups_in_flight
        assert most is not None, "--fully-async must set max_groups_in_flight"
        self.interrupted: Counter[int] = Counter()
        """Group index -> number of interruptions in this step."""
        self._max_groups_in_flight, self._buffer = most, buffer

    def num_missing(self, loop: GroupLoop) -> int:
        """Returns the limit minus the number of running and finished groups."""
        return self._max_groups_in_flight - len(loop.running) - self._buffer.num_finished

    def was_meant(self, loop: GroupLoop, group: Group) -> bool:
        """Returns True for a group's first `MAX_TRIES - 1` interruptions in a step, because weight syncs cause them."""
        self.interrupted[group.group_index] += 1
        return self.interrupted[group.group_index] < MAX_TRIES

    def accept(self, loop: GroupLoop, group: GroupOrRecord) -> None:
        """Leaves the group in the buffer until a step takes it."""
        self._buffer.put_finished(group)
        loop.context.progress.done = self._buffer.num_finished


class RolloutWorker:
    """Generates on the running event loop from construction until `close`."""

    def __init__(self, context: RolloutContext, buffer: DataBuffer) -> None:
        """Raises `HookError`."""
        self._buffer, self._policy = buffer, BoundedPolicy(context, buffer)
        self._loop = GroupLoop(context, RolloutHooks.load(context.args), buffer, self._policy)
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._work(), name="rollout-worker")
        self._task.add_done_callback(lambda _: self._news.set())

    @property
    def scope(self) -> RequestScope:
        """The scope of all of the worker's requests."""
        return self._loop.scope

    @property
    def running(self) -> list[Group]:
        return list(self._loop.running.values())

    async def step(self, context: RolloutContext, rollout_id: int) -> RolloutFnTrainOutput:
        """Returns exactly `rollout_batch_size` finished groups.

        Raises the errors of `GroupLoop.turn`, and `DeadlineExceeded` after `--rollout-global-timeout-s`.
        """
        loop = self._loop
        loop.begin_step(context, rollout_id)
        loop.end_quarantine()
        began = time.monotonic()
        while not (batch := self._take()):
            if self._task.done():
                self._task.result()
            self._news.clear()
            left_s = loop.time_left_s(began)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._news.wait()
        output = await loop.hand_out(batch)
        output.metrics["perf/rollout_idle_time"] = loop.counts.idle_s
        output.metrics["rollout/num_running_groups"] = float(len(loop.running))
        loop.counts, loop.rollout_id = StepCounts(), rollout_id + 1  # later events count towards the next step
        self._policy.interrupted.clear()
        return output

    async def pause(self, *, hand_back: bool) -> None:
        """Ends all requests; they continue at `resume` from the tokens they have.

        `hand_back`: return the groups to the buffer with these tokens.
        """
        await self._loop.episodes.pause(self.scope if hand_back else None)

    def resume(self) -> None:
        self._loop.episodes.resume()

    async def close(self) -> None:
        """Ends all requests and puts the groups back."""
        await end_tasks([self._task], 4 * END_LIMIT_S)

    def _take(self) -> list[GroupRecord]:
        """Takes a full batch, or nothing. Wakes the worker, because taken and stale groups free up slots."""
        self._loop.wake()
        return self._buffer.take_finished(self._loop.target)

    async def _work(self) -> None:
        REQUEST_SCOPE.set(self.scope)
        try:
            while True:
                await self._loop.turn()
                if self._buffer.num_finished >= self._loop.target:
                    self._news.set()
        finally:
            await self._loop.abandon()
            await self._loop.episodes.drain()
