"""One training step's rollout: issues groups from the Data Buffer until enough are finished, and settles every one.

Who wakes whom: one task per group; the loop sleeps until any of them ends. It alone talks to the buffer, on the
manager's event loop. At the target it aborts the rest through the request scope, which makes their requests return.

Invariants
1. Every group taken from the buffer is accepted, put back, marked filtered or marked failed before the loop returns or
   raises (on an error all that are left are put back).
2. A failed, unscored or interrupted execution is tried again, at most `MAX_TRIES` times per step (by the worker of
   `--fully-async`: in its life), and then its group is dropped as failed: an infrastructure failure never becomes a
   reward. What the loop itself aborted does not count.
3. The loop ends: filters, failures and time are bounded, and the error says which bound was met.
4. When it returns, no request of this rollout is left in an engine.
5. A group whose request found no answer in time is quarantined: it is put back at the end of the step, so no try of it
   comes before the next one. The `MAX_TRIES`th time it is dropped as failed.
6. Without `--partial-rollout` a group holds work of this step only: what an earlier step left in it, finished or not,
   was sampled by weights that may be older, and is dropped when the group is issued. `--max-weight-staleness` keeps
   what is finished and not older than it says (the buffer looks).
User functions run in threads, so that the event loop answers while they compute.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import Any, Protocol

from slime.buffer.groups import reset_group
from slime.buffer.origin import note_quarantines, num_quarantines
from slime.core.errors import DataError, DeadlineExceeded, EngineError, HookError
from slime.core.sample import Group
from slime.rollout.client import REQUEST_SCOPE, RequestScope
from slime.rollout.context import RolloutContext, current, use
from slime.rollout.evaluate import evaluate
from slime.rollout.execute import GroupResult, Outcome, failure_kind, is_finished, run_group
from slime.rollout.hooks import RolloutHooks, in_thread, keep_group
from slime.rollout.metrics import sample_metrics
from slime.rollout.sampling import rollout_sampling_params
from slime.rollout.types import RolloutFnEvalOutput, RolloutFnTrainOutput

logger = logging.getLogger(__name__)

MAX_TRIES = 3
"""Tries of a group with failing executions, per step or worker."""
MAX_FILTERED_FACTOR = 32
"""Filtered groups per wanted group after which the step gives up."""
MIN_FAILED_GROUPS = 4
"""So many groups may fail for good in any step; beyond it, as many as are wanted."""
ABORT_REPEAT_S = 0.5
"""An abort can overtake its request on the way to the engine, so it is repeated until all have ended."""
ABORT_LIMIT_S = 30.0
"""After this, tasks that still run (tools, sandboxes) are cancelled."""


class GroupSource(Protocol):
    """What the loop needs of the Data Buffer."""

    def get_groups(self, n: int) -> list[Group]: ...
    def put_back(self, groups: list[Group], reason: str) -> None: ...
    def start_over(self, group: Group) -> Group: ...
    def note(self, group: Group) -> None: ...
    def mark_filtered(self, group_indices: list[int], reason: str) -> None: ...
    def mark_failed(self, group_indices: list[int], reason: str) -> None: ...


class StepLoop:
    """The state of one step's rollout. Use once: `await StepLoop(...).run()`."""

    def __init__(self, context: RolloutContext, hooks: RolloutHooks, rollout_id: int, source: GroupSource) -> None:
        args = context.args
        self.args, self.context, self.hooks, self.source = args, context, hooks, source
        self.target: int = args.rollout_batch_size
        self.round: int = max(args.over_sampling_batch_size or self.target, 1)
        self.params = rollout_sampling_params(args)
        self.scope = RequestScope()
        self.running: dict[asyncio.Task[GroupResult], Group] = {}
        self.accepted: list[Group] = []
        self.quarantined: list[Group] = []
        """Kept from the buffer until the step ends."""
        self.issued: set[int] = set()
        self.tries: Counter[int] = Counter()
        self.begin_step(rollout_id)

    def begin_step(self, rollout_id: int) -> None:
        """Counts from zero."""
        self.rollout_id = rollout_id
        self.dropped: list[Group] = []
        """What the dynamic filter dropped; kept for `--rollout-all-samples-process-path` only."""
        self.filtered: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.retried: Counter[str] = Counter()
        self.num_surplus = self.num_aborted = self.num_reset = self.num_quarantined = 0
        self.started = time.monotonic()

    async def run(self) -> list[Group]:
        """Returns exactly `rollout_batch_size` finished groups, sorted by prompt id.

        Raises `DataError` if the filter rejects nearly everything, `EngineError` if too many groups fail,
        `DeadlineExceeded` beyond `--rollout-global-timeout-s`, and what user hooks raise on purpose.
        """
        self.context.progress.begin(f"rollout {self.rollout_id}", self.target)
        token = REQUEST_SCOPE.set(self.scope)
        try:
            while len(self.accepted) < self.target:
                self._refill()
                done, _ = await asyncio.wait(
                    self.running, timeout=self._time_left_s(), return_when=asyncio.FIRST_COMPLETED
                )
                for task in sorted(done, key=lambda t: self.running[t].group_index):
                    await self._settle(task, self.running.pop(task))
            await self._stop_surplus()
        except BaseException:
            await self._abandon()
            raise
        finally:
            REQUEST_SCOPE.reset(token)
            if self.context.client is not None:
                await self.context.client.drain()
        return sorted(self.accepted, key=lambda g: g.group_index)

    def metrics(self) -> dict[str, float]:
        """Counters of this step."""
        counts: dict[str, float] = {
            f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self.filtered.items()
        }
        counts |= {f"rollout/failed/{reason}": count for reason, count in self.failed.items()}
        counts |= {f"rollout/retried/{reason}": count for reason, count in self.retried.items()}
        counts |= {
            "rollout/num_filtered_groups": sum(self.filtered.values()),
            "rollout/num_failed_groups": sum(self.failed.values()),
            "rollout/num_retried_groups": sum(self.retried.values()),
            "rollout/num_quarantined_groups": self.num_quarantined,
            "rollout/num_unscored_groups": sum(n for r, n in self.retried.items() if r.startswith("unscored")),
            "rollout/num_surplus_groups": self.num_surplus,
            "rollout/num_aborted_groups": self.num_aborted,
            "rollout/num_reset_groups": self.num_reset,
            "perf/rollout_time": time.monotonic() - self.started,
        }
        return {name: float(value) for name, value in counts.items()}

    def _refill(self) -> None:
        """Issues rounds of groups while those under way cannot reach the target."""
        while self.has_room():
            groups = self.source.get_groups(self.round)
            if not groups:
                raise DataError("got no group from the data source; it must issue groups as long as the run needs them")
            for group in map(self.first_of_step, groups):
                self.start(group)

    def has_room(self) -> bool:
        """Whether another group is to be started."""
        return len(self.accepted) + len(self.running) < self.target

    def start(self, group: Group) -> asyncio.Task[GroupResult]:
        """Sets one group to work."""
        task = asyncio.create_task(
            run_group(self.context, group, self.params, self.hooks.generate), name=f"group-{group.group_index}"
        )
        self.running[task] = group
        return task

    def first_of_step(self, group: Group) -> Group:
        """The group as this step may train it: without the work of an earlier step, unless that is allowed."""
        first = group.group_index not in self.issued
        self.issued.add(group.group_index)
        worked_on = group.attempts > 0 and any(s.response_length for s in group.samples)
        may_be_older = self.args.max_weight_staleness is not None and is_finished(group.samples, scored=True)
        if not first or self.args.partial_rollout or may_be_older or not worked_on:
            return group
        self.num_reset += 1
        return self.source.start_over(group)

    async def _settle(self, task: asyncio.Task[GroupResult], group: Group) -> None:
        """Accepts, filters, retries or drops one ended group."""
        try:
            result = task.result()
        except BaseException:
            self.source.put_back([group], "error")
            raise
        if result.outcome is Outcome.FINISHED:
            await self._filter(result.group)
        elif result.outcome is Outcome.ABORTED and self.aborts(group):
            self.num_aborted += 1
            self.source.put_back([result.group], "aborted")
        else:
            self._retry_or_drop(result)

    def aborts(self, group: Group) -> bool:
        """Whether an interruption of the group was meant, and is no failure."""
        return self.scope.aborted

    def accept(self, group: Group) -> None:
        """Keeps a finished group for the batch."""
        self.accepted.append(group)
        self.context.progress.done = len(self.accepted)

    async def _filter(self, group: Group) -> None:
        """Accepts a finished group unless the user's filter drops it; a surplus one waits in the buffer."""
        if len(self.accepted) >= self.target:
            self.num_surplus += 1
            self.source.put_back([group], "surplus")
            return
        if self.hooks.dynamic_filter is not None:
            try:
                verdict = await keep_group(self.hooks.dynamic_filter, self.args, list(group.samples))
            except BaseException:
                self.source.put_back([group], "error")
                raise
            fills = len(self.accepted) + len(self.running) >= self.target  # others are enough for the step
            if not verdict.keep and (fills or not verdict.keep_when_insufficient):
                reason = verdict.reason or "filter"
                self.filtered[reason] += 1
                self.source.mark_filtered([group.group_index], reason)
                if self.hooks.all_samples is not None:
                    self.dropped.append(group)
                self._check_filtered()
                return
        self.accept(group)

    def _check_filtered(self) -> None:
        dropped = sum(self.filtered.values())
        if dropped >= MAX_FILTERED_FACTOR * self.target:
            raise DataError(
                f"got {dropped} groups dropped by the dynamic filter and {self.context.progress.done} of {self.target} "
                f"kept in step {self.rollout_id}, because of {dict(self.filtered.most_common(3))}; the task is too "
                "easy or too hard, or its grader is broken: look at the rewards, or change the data or the filter"
            )

    def _retry_or_drop(self, result: GroupResult) -> None:
        """A failure: again, unless it was tried often enough or can never succeed."""
        index, kind = result.group.group_index, failure_kind(result)
        self.tries[index] += 1
        times = num_quarantines(result.group) + 1
        if result.outcome is Outcome.EXPIRED and times < MAX_TRIES:
            logger.warning("group %d is quarantined until the next step: %s", index, result.reason)
            self.quarantined.append(note_quarantines(result.group, times))
            self.source.note(self.quarantined[-1])
            self.num_quarantined += 1
            self._check_failed(result.reason)
            return
        if result.outcome not in (Outcome.REJECTED, Outcome.EXPIRED) and self.tries[index] < MAX_TRIES:
            self.retried[kind] += 1
            self.source.put_back([result.group], kind)
            return
        logger.warning("group %d is given up: %s: %s", index, result.outcome.value, result.reason)
        self.failed[kind] += 1
        self.source.mark_failed([index], kind)
        self._check_failed(result.reason)

    def _check_failed(self, reason: str) -> None:
        lost = sum(self.failed.values()) + self.num_quarantined
        if lost > max(MIN_FAILED_GROUPS, self.target):
            raise EngineError(
                f"got {lost} failed groups in step {self.rollout_id} and {self.context.progress.done} of "
                f"{self.target} finished; the last one failed because: {reason}"
            )

    def _time_left_s(self) -> float | None:
        """Seconds until the step's limit; None without one."""
        limit_s: float | None = self.args.rollout_global_timeout_s
        if limit_s is None:
            return None
        left = limit_s - (time.monotonic() - self.started)
        if left <= 0:
            raise DeadlineExceeded.waiting(
                owner=f"rollout of step {self.rollout_id}",
                for_what=f"{self.target} groups",
                limit_s=limit_s,
                last_progress=str(self.context.progress),
            )
        return left

    async def _stop_surplus(self) -> None:
        """Aborts what still runs and puts it back; a partial execution keeps its tokens with `--partial-rollout`."""
        deadline = time.monotonic() + ABORT_LIMIT_S
        while self.running and time.monotonic() < deadline:
            self.scope.aborted = True
            if self.context.client is not None:
                await self.context.client.abort_scope(self.scope)
            done, _ = await asyncio.wait(self.running, timeout=ABORT_REPEAT_S)
            for task in sorted(done, key=lambda t: self.running[t].group_index):
                await self._settle(task, self.running.pop(task))
        await self._abandon(reason="aborted", accepted=False)

    async def _abandon(self, *, reason: str = "error", accepted: bool = True) -> None:
        """Cancels what runs and puts back all groups that are not settled; work in progress starts over."""
        self.scope.aborted = True
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)
        held, self.quarantined = self.quarantined, []
        if held:
            self.source.put_back(held, "quarantined")
        again = [reset_group(group) for group in self.running.values()]
        self.num_aborted += len(again)
        self.running.clear()
        if accepted:
            again += self.accepted
            self.accepted = []
        if again:
            self.source.put_back(again, reason)


async def generate_step(context: RolloutContext, rollout_id: int, source: GroupSource) -> RolloutFnTrainOutput:
    """The default rollout of one step."""
    loop = StepLoop(context, RolloutHooks.load(context.args), rollout_id, source)
    return await finish_step(loop, await loop.run())


async def finish_step(loop: StepLoop, batch: list[Group]) -> RolloutFnTrainOutput:
    """Shows the groups of a batch to the hooks, and counts."""
    args, hooks, groups = loop.args, loop.hooks, [list(group.samples) for group in batch]
    if hooks.sample_filter is not None:
        await in_thread(hooks.sample_filter, args, groups)
    if hooks.all_samples is not None:
        await in_thread(hooks.all_samples, args, groups + [list(group.samples) for group in loop.dropped], loop.source)
    return RolloutFnTrainOutput(groups, {**loop.metrics(), **sample_metrics(args, groups)})


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """The default of `--rollout-function-path`, for user functions that wrap it: blocks its own thread.

    The manager calls `generate_step` and `evaluate` directly. Raises `HookError` on the manager's own event loop.
    """
    context = current()
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is context.loop:
        raise HookError(
            "got generate_rollout called on the rollout's event loop; make the calling function synchronous"
        )
    work: Any = evaluate(context, rollout_id) if evaluation else generate_step(context, rollout_id, data_source)

    async def in_context() -> Any:
        with use(context):
            return await work

    result: RolloutFnTrainOutput | RolloutFnEvalOutput = asyncio.run_coroutine_threadsafe(
        in_context(), context.loop
    ).result()
    return result
