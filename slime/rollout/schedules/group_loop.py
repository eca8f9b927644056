"""The loop shared by schedules: starts groups from the Data Buffer, and settles each group when it ends.

    loop = GroupLoop(context, hooks, source, policy)
    while ...:
        await loop.turn()          # starts new groups, sleeps until a group ends, settles ended groups
    output = await loop.hand_out(groups)

Each running group is a task in which `Episodes` runs it, in this or another process. Finished groups go to
`Policy.accept`; all others are put back, marked filtered or marked failed. A turn wakes up when a group ends, or on
`wake`. Everything runs on the manager's event loop, and only `GroupLoop` calls the buffer. User functions run in
threads, so that the event loop stays responsive.

Invariants
1. Every group taken from the buffer is running, accepted, put back, quarantined, marked filtered or marked failed.
   `abandon` puts back all unsettled groups.
2. A failed, unscored or interrupted execution is retried. After `MAX_TRIES` attempts in the loop's lifetime, its group
   is dropped as failed: an infrastructure failure never becomes a reward. Intended interruptions do not count. A
   group whose executions are refused to the last attempt is accepted instead, without rewards (`Outcome.REFUSED`).
3. If too many groups of a step are filtered or fail, the step raises an error.
4. If a request of a group times out, the group is quarantined: it is not retried until `end_quarantine` puts it back,
   in the next step. The `MAX_TRIES`th time, the group is dropped as failed. A group that killed engines is dropped
   immediately.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from slime.buffer.data_buffer import DataBuffer
from slime.buffer.groups import GroupOrRecord, group_of, note_quarantines, num_quarantines, reset_group
from slime.buffer.samplers import MOST_SHOWN
from slime.core.errors import DataError, DeadlineExceeded, GroupsFailed
from slime.core.sample import Group, Sample
from slime.rollout.client.engine_client import RequestScope
from slime.rollout.context import RolloutContext, use
from slime.rollout.execute import GIVEN_UP, GroupResult, Outcome, failure_kind, untrained, without_refused
from slime.rollout.generate import rollout_sampling_params
from slime.rollout.guard import END_LIMIT_S, beside, end_tasks
from slime.rollout.sample_metrics import sample_metrics
from slime.rollout.transcript import HOOK_CHANGED, REFUSED, Seals, tell_refused
from slime.rollout.types import RolloutFnTrainOutput
from slime.rollout.user_functions import RolloutHooks, in_time
from slime.rollout.workers.episodes import Episodes, LocalEpisodes
from slime.settings import for_hook


@dataclass(slots=True)
class StepCounts:
    filtered: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    retried: Counter[str] = field(default_factory=Counter)
    """Failure kind -> number of retries."""
    num_surplus: int = 0
    num_aborted: int = 0
    num_reset: int = 0
    """Groups that started over because an earlier step had started them."""
    num_quarantined: int = 0
    num_refused: int = 0
    """Samples that were refused because they are not as sampled, in all attempts."""
    refusal: str = ""
    """Why the first of them was refused."""
    dropped: list[GroupOrRecord] = field(default_factory=list)
    """Groups dropped by the dynamic filter; stored only for `--rollout-all-samples-process-path`."""
    kept_of_task: Counter[str] = field(default_factory=Counter)
    dropped_of_task: Counter[str] = field(default_factory=Counter)
    """Task -> number of groups that the dynamic filter kept or dropped."""
    idle_s: float = 0.0
    """Time during which no group was running."""
    started: float = field(default_factory=time.monotonic)

    def refuse(self, num: int, reason: str) -> None:
        self.num_refused, self.refusal = self.num_refused + num, self.refusal or reason

    def metrics(self) -> dict[str, float]:
        counts: dict[str, float] = {}
        for task in sorted(self.kept_of_task | self.dropped_of_task)[:MOST_SHOWN]:
            counts[f"rollout/task/{task}/num_kept_groups"] = self.kept_of_task[task]
            counts[f"rollout/task/{task}/num_dropped_groups"] = self.dropped_of_task[task]
        counts |= {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self.filtered.items()}
        counts |= {f"rollout/failed/{kind}": count for kind, count in self.failed.items()}
        counts |= {f"rollout/retried/{kind}": count for kind, count in self.retried.items()}
        counts |= {
            "rollout/num_filtered_groups": self.filtered.total(),
            "rollout/num_failed_groups": self.failed.total(),
            "rollout/num_retried_groups": self.retried.total(),
            "rollout/num_quarantined_groups": self.num_quarantined,
            "rollout/num_unscored_groups": sum(n for kind, n in self.retried.items() if kind.startswith("unscored")),
            "rollout/num_surplus_groups": self.num_surplus,
            "rollout/num_aborted_groups": self.num_aborted,
            "rollout/num_reset_groups": self.num_reset,
            REFUSED: self.num_refused,
            "perf/rollout_time": time.monotonic() - self.started,
        }
        return {name: float(value) for name, value in counts.items()}


logger = logging.getLogger(__name__)

MAX_TRIES = 3
MAX_FILTERED_FACTOR = 32
"""A step fails after this many filtered groups per group of the batch."""
MIN_FAILED_GROUPS = 4
"""Up to this many groups may fail in a step, or as many as the batch size if that is larger."""


class Policy(ABC):
    """The decisions of a schedule. No method may block."""

    @abstractmethod
    def num_missing(self, loop: GroupLoop) -> int:
        """Returns how many more groups to start; none if zero or negative."""

    def admit(self, loop: GroupLoop, group: Group) -> Group:
        """Returns the group to run. Called before a group starts."""
        return group

    @abstractmethod
    def was_meant(self, loop: GroupLoop, group: Group) -> bool:
        """Returns whether the group was interrupted on purpose, which does not count as a failure."""

    def is_surplus(self, loop: GroupLoop) -> bool:
        """Returns whether a finished group goes back to the buffer because the batch is full."""
        return False

    def others_fill_the_step(self, loop: GroupLoop) -> bool:
        """Returns whether the batch will fill up without the current group."""
        return len(loop.running) >= loop.target

    @abstractmethod
    def accept(self, loop: GroupLoop, group: GroupOrRecord) -> None:
        """Accepts a finished group, for example into the batch."""


class GroupLoop:
    """Tracks the running groups, the attempts of each group, and the counts of the step."""

    def __init__(self, context: RolloutContext, hooks: RolloutHooks, source: DataBuffer, policy: Policy) -> None:
        self.args, self.context, self.hooks, self.source, self.policy = context.args, context, hooks, source, policy
        self.target: int = context.args.rollout_batch_size
        self.params = rollout_sampling_params(context.args)
        self.episodes: Episodes = context.workers or LocalEpisodes(context.client)
        self.scope = RequestScope()
        """The scope of all of the groups' requests. The task that calls `turn` must set `REQUEST_SCOPE` to it."""
        self.running: dict[asyncio.Task[GroupResult], Group] = {}
        self.quarantined: list[GroupOrRecord] = []
        """Groups that stay out of the buffer until `end_quarantine`."""
        self.tries: Counter[int] = Counter()
        self._first_reasons: dict[int, str] = {}
        """Group index -> why its first attempt failed."""
        self.rollout_id = -1
        self.counts = StepCounts()
        self._woken = asyncio.Event()

    def begin_step(self, context: RolloutContext, rollout_id: int) -> None:
        """Attributes subsequent progress and messages to this step."""
        self.context, self.rollout_id = context, rollout_id
        context.progress.begin("groups", self.target)

    async def turn(self, timeout_s: float | None = None) -> None:
        """Starts groups, sleeps until a group ends, `wake` is called or the timeout expires, then settles ended groups.

        Raises `DataError` if the filter rejects nearly everything, `GroupsFailed` if too many groups fail, and any
        error that a user hook raises deliberately.
        """
        self._refill()
        rests, since = not self.running, time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # `wait_for` in Python 3.11 can swallow a cancellation
                await self._woken.wait()
        self._woken.clear()
        self.counts.idle_s += (time.monotonic() - since) * rests
        await self.settle([task for task in self.running if task.done()])

    def wake(self) -> None:
        self._woken.set()

    async def settle(self, ended: Sequence[asyncio.Task[GroupResult]]) -> None:
        for task in sorted(ended, key=lambda t: self.running[t].group_index):
            await self._settle(task, self.running.pop(task))

    def end_quarantine(self) -> None:
        groups, self.quarantined = self.quarantined, []
        if groups:
            self.source.put_back(groups, "quarantined")

    async def abandon(self, *, reason: str = "error", accepted: Sequence[GroupOrRecord] = ()) -> None:
        """Cancels running groups, which must start over, and puts back all unsettled groups and `accepted`."""
        self.scope.aborted = True
        await end_tasks(self.running, 3 * END_LIMIT_S)
        self.end_quarantine()
        again: list[GroupOrRecord] = [reset_group(group) for group in self.running.values()]
        self.counts.num_aborted += len(again)
        self.running.clear()
        again += accepted
        if again:
            self.source.put_back(again, reason)

    async def hand_out(self, batch: Sequence[GroupOrRecord]) -> RolloutFnTrainOutput:
        """Sorts a batch by prompt, runs the hooks on it, and returns it with the step's metrics."""
        limit_s = self.args.execution_timeout_s
        groups = await beside(_unpacked, sorted(batch, key=lambda group: group.group_index))
        looked_at = self.hooks.sample_filter is not None or self.hooks.all_samples is not None
        seals = await beside(Seals, [s for group in groups for s in group]) if looked_at else None
        if self.hooks.sample_filter is not None:
            await in_time(limit_s, self.hooks.sample_filter, for_hook(self.args), groups)
        if self.hooks.all_samples is not None:
            dropped = await beside(_unpacked, self.counts.dropped)
            await in_time(limit_s, self.hooks.all_samples, for_hook(self.args), groups + dropped, self.source)
        if seals is not None:
            self.counts.refuse(await beside(seals.mark_changed, [s for group in groups for s in group]), HOOK_CHANGED)
        tell_refused(self.rollout_id, self.counts.num_refused, self.counts.refusal)
        left_behind = await self.episodes.num_left_behind()
        counts = {**self.counts.metrics(), "rollout/num_left_behind": float(left_behind)}
        return RolloutFnTrainOutput(groups, {**counts, **await beside(sample_metrics, self.args, groups)})

    def time_left_s(self, start_s: float) -> float | None:
        """Returns the seconds left for a step started at `start_s`; None without a limit. Raises `DeadlineExceeded`."""
        limit_s = self.args.rollout_global_timeout_s
        if limit_s is None:
            return None
        left = limit_s - (time.monotonic() - start_s)
        if left <= 0:
            raise DeadlineExceeded.waiting(
                owner=f"the rollout of step {self.rollout_id}",
                for_what=f"{self.target} groups",
                limit_s=limit_s,
                last_progress=str(self.context.progress),
            )
        return left

    # ---- starting ------------------------------------------------------------------------------------------------

    def _refill(self) -> None:
        while (num := self.policy.num_missing(self)) > 0:
            groups = self.source.get_groups(num)
            if not groups:
                raise DataError("the data source returned no groups; it must issue groups until the run ends")
            for group in groups:
                self._start(self.policy.admit(self, group))

    def _start(self, group: Group) -> None:
        with use(self.context):
            work = self.episodes.run(self.context, group, self.params, self.hooks, self.scope)
            task = asyncio.create_task(work, name=f"group-{group.group_index}")
        task.add_done_callback(lambda _: self.wake())
        self.running[task] = group

    # ---- settling ------------------------------------------------------------------------------------------------

    async def _settle(self, task: asyncio.Task[GroupResult], group: Group) -> None:
        """Accepts, filters, retries or drops a group that has ended."""
        try:
            result = task.result()
        except BaseException:
            self.source.put_back([group], "error")
            raise
        if result.num_refused:
            self.counts.refuse(result.num_refused, result.refusal)
        if result.outcome is Outcome.FINISHED:
            self._take_finished(result)
        elif result.outcome is Outcome.ABORTED and self.policy.was_meant(self, group):
            self.counts.num_aborted += 1
            self.source.put_back([result.group], "aborted")
        else:
            self._retry_or_drop(result)

    def _take_finished(self, result: GroupResult) -> None:
        """Accepts a finished group unless it is surplus or filtered."""
        group, verdict = result.group, result.verdict
        keeps_anyway = (
            verdict is not None and verdict.keep_when_insufficient and not self.policy.others_fill_the_step(self)
        )
        if self.policy.is_surplus(self):
            self.counts.num_surplus += 1
            self.source.put_back([group], "surplus")
            return
        keeps = verdict is None or verdict.keep or keeps_anyway
        self._note_rewards(group, result.rewards, keeps=keeps)
        if keeps:
            if isinstance(group, Group):
                group.pack()
            self.policy.accept(self, group)
        else:
            assert verdict is not None, "only the filter drops a finished group"
            self._drop(group, verdict.reason or "filter")

    def _note_rewards(self, group: GroupOrRecord, rewards: Sequence[float], *, keeps: bool) -> None:
        """Tells the prompt sampler the rewards of a finished group, and counts it for its task."""
        self.source.note_rewards(group.group_index, rewards)
        task = self.source.task(group.group_index)
        if task is not None:
            counts = self.counts.kept_of_task if keeps else self.counts.dropped_of_task
            counts[task] += 1

    def _drop(self, group: GroupOrRecord, reason: str) -> None:
        self.counts.filtered[reason] += 1
        self.source.mark_filtered([group.group_index], reason)
        if self.hooks.all_samples is not None:
            self.counts.dropped.append(group)
        filtered = self.counts.filtered
        if filtered.total() >= MAX_FILTERED_FACTOR * self.target:
            raise DataError(
                f"the dynamic filter dropped {filtered.total()} groups in step {self.rollout_id} and kept "
                f"{self.context.progress.done} of {self.target}; the most frequent reasons are "
                f"{dict(filtered.most_common(3))}. The task is too easy or too hard, or its grader is broken: check "
                "the rewards, then change the data or the filter"
            )

    def _retry_or_drop(self, result: GroupResult) -> None:
        """Retries a failed group, unless it has used up its attempts or can never succeed."""
        index, kind = result.group.group_index, failure_kind(result)
        self.tries[index] += 1
        if result.outcome is Outcome.REFUSED:
            self._retry_or_accept(result, kind)
            return
        first = self._first_reasons.setdefault(index, result.reason)
        same = first == result.reason
        reason = first if same else f"{first} (in the first attempt; the last one failed with {result.reason})"
        if result.outcome is Outcome.EXPIRED and num_quarantines(group_of(result.group)) + 1 < MAX_TRIES:
            self._quarantine(result)
        elif result.outcome not in GIVEN_UP and self.tries[index] < MAX_TRIES:
            self.counts.retried[kind] += 1
            self.source.put_back([result.group], kind)
        else:
            logger.warning("dropping group %d as failed: %s: %s", index, result.outcome.value, reason)
            self.counts.failed[kind] += 1
            self.source.mark_failed([index], kind)
            self._check_failed(reason)

    def _retry_or_accept(self, result: GroupResult, kind: str) -> None:
        """Retries a refused group; after its last attempt, accepts it without rewards."""
        group = group_of(result.group)
        if self.tries[group.group_index] < MAX_TRIES:
            self.counts.retried[kind] += 1
            self.source.put_back([without_refused(group)], kind)
        else:
            self._take_finished(dataclasses.replace(result, group=untrained(group)))

    def _quarantine(self, result: GroupResult) -> None:
        """Keeps the group out of the buffer until the next step. Its samples record this for checkpoints."""
        logger.warning("quarantining group %d until the next step: %s", result.group.group_index, result.reason)
        group = group_of(result.group)
        note_quarantines(group, num_quarantines(group) + 1)
        self.quarantined.append(group)
        self.source.note(group)
        self.counts.num_quarantined += 1
        self._check_failed(result.reason)

    def _check_failed(self, reason: str) -> None:
        lost = self.counts.failed.total() + self.counts.num_quarantined
        if lost > max(MIN_FAILED_GROUPS, self.target):
            raise GroupsFailed(
                f"{lost} groups failed in step {self.rollout_id}, and {self.context.progress.done} of {self.target} "
                f"are finished; last failure: {reason}"
            )


def _unpacked(batch: Sequence[GroupOrRecord]) -> list[list[Sample]]:
    return [list(group_of(group).samples) for group in batch]
