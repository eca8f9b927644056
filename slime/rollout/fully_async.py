"""The rollout of `--fully-async`: one worker for the whole run, which goes on while the trainer trains and publishes.

Who produces, who consumes: the worker keeps `--max-groups-in-flight` groups running or finished; finished ones wait in
the Data Buffer, and `step` takes a batch of them, the oldest first. Who wakes whom: an ended group and a taken batch
wake the worker (`_wake`); a full batch wakes `step` (`_news`). All on the manager's event loop.

Invariants
1. The worker rests only when finished groups fill its bound.
2. A group that a weight sync interrupts (any with `--pause-generation-mode abort`, one before a checkpoint with the
   others) goes back to the buffer and on at once, with its tokens: the client holds its requests back until engines
   serve the new weights. Interrupted `MAX_TRIES` times in one step it counts as failed. Through other weight syncs
   requests live.
3. A batch holds no token older than `--max-weight-staleness`: the buffer looks when a group is issued and when it is
   taken. No group starves, since a trainer that waits publishes nothing, and what runs then finishes in time.
4. An error of the worker is raised by the step that waits for it, or by the next; all its groups are then put back.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter

from slime.buffer.data_buffer import DataBuffer
from slime.core.sample import Group
from slime.rollout.client import REQUEST_SCOPE
from slime.rollout.context import RolloutContext, use
from slime.rollout.execute import GroupResult
from slime.rollout.hooks import RolloutHooks
from slime.rollout.loop import MAX_TRIES, StepLoop, finish_step
from slime.rollout.types import RolloutFnTrainOutput


class RolloutWorker(StepLoop):
    """Starts to work when it is made, on the running event loop; `close` ends it."""

    def __init__(self, context: RolloutContext, buffer: DataBuffer) -> None:
        """Raises `HookError`."""
        super().__init__(context, RolloutHooks.load(context.args), -1, buffer)
        self.buffer, self.round = buffer, 1
        self._wake, self._news = asyncio.Event(), asyncio.Event()
        self._task = asyncio.create_task(self._work(), name="rollout-worker")
        self._task.add_done_callback(lambda _: self._news.set())

    async def step(self, context: RolloutContext, rollout_id: int) -> RolloutFnTrainOutput:
        """Exactly `rollout_batch_size` groups, finished in this step or before. Raises as `StepLoop.run` does."""
        self.context, self.rollout_id = context, rollout_id
        context.progress.begin(f"rollout {rollout_id}", self.target)
        held, self.quarantined = self.quarantined, []
        if held:
            self.buffer.put_back(held, "quarantined")
        began = time.monotonic()
        while not (batch := self._take()):
            if self._task.done():
                self._task.result()
            self._news.clear()
            self.started = began  # the limit is that of the wait
            left_s = self._time_left_s()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), left_s)
        output = await finish_step(self, sorted(batch, key=lambda g: g.group_index))
        self.begin_step(rollout_id + 1)
        return output

    def metrics(self) -> dict[str, float]:
        """Counters since the last batch."""
        mine = {"perf/rollout_idle_time": self.idle_s, "rollout/num_running_groups": float(len(self.running))}
        return {**super().metrics(), **mine}

    async def close(self) -> None:
        """Ends all requests and puts the groups back."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    # ---- what differs from a step of its own ---------------------------------------------------------------------

    def begin_step(self, rollout_id: int) -> None:
        super().begin_step(rollout_id)
        self.idle_s = 0.0
        self.interrupted: Counter[int] = Counter()

    def has_room(self) -> bool:
        return len(self.running) + self.buffer.num_finished < self.args.max_groups_in_flight

    def first_of_step(self, group: Group) -> Group:
        return group

    def start(self, group: Group) -> asyncio.Task[GroupResult]:
        with use(self.context):
            task = super().start(group)
        task.add_done_callback(lambda _: self._wake.set())
        return task

    def aborts(self, group: Group) -> bool:
        self.interrupted[group.group_index] += 1
        return self.interrupted[group.group_index] < MAX_TRIES

    def accept(self, group: Group) -> None:
        self.buffer.put_finished(group)
        self.context.progress.done = self.buffer.num_finished

    def _take(self) -> list[Group]:
        self._wake.set()
        return self.buffer.take_finished(self.target)

    async def _work(self) -> None:
        REQUEST_SCOPE.set(self.scope)
        try:
            while True:
                self._refill()
                rests, since = not self.running, time.monotonic()
                await self._wake.wait()
                self._wake.clear()
                self.idle_s += (time.monotonic() - since) * rests
                for task in sorted((t for t in self.running if t.done()), key=lambda t: self.running[t].group_index):
                    await self._settle(task, self.running.pop(task))
                if self.buffer.num_finished >= self.target:
                    self._news.set()
        finally:
            await self._abandon()
            if self.context.client is not None:
                await self.context.client.drain()
