"""`Episodes`: who works on groups, and how a loop ends their requests. `Here`: this process, on this event loop.

Consumes: groups of a loop. Produces: a `GroupResult` for each. Waits for: the executions of the group, then for the
user's filter. Is woken by: their end, or the cancellation of the call.

Invariants
1. A call that is cancelled returns when nothing of its group runs any more, or after a limit that says so.
2. `abort` ends the requests of one scope, wherever they are; `pause` those of everybody, and holds new ones back.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.buffer.groups import GroupRecord, group_of
from slime.core.errors import ActorDied, WorkerStalled
from slime.core.sample import Group, Sample
from slime.rollout.client.upstream import RequestScope
from slime.rollout.execute import (
    Execution,
    GroupResult,
    Outcome,
    count_pauses,
    run_execution,
    run_group,
    was_interrupted,
)
from slime.rollout.filters import without_unscored
from slime.rollout.generate import eval_sampling_params
from slime.rollout.guard import num_left_behind
from slime.rollout.transcript import TRANSCRIPT, Seals, Transcript
from slime.rollout.types import DynamicFilterOutput, Progress
from slime.rollout.user_functions import RolloutHooks, keep_group
from slime.settings.eval_config import EvalDatasetConfig

if TYPE_CHECKING:
    from slime.rollout.client.client import EngineClient
    from slime.rollout.context import RolloutContext


class Episodes(ABC):
    """What a loop over groups asks of whoever works on them."""

    @abstractmethod
    async def run(
        self,
        context: RolloutContext,
        group: Group,
        params: Mapping[str, Any],
        hooks: RolloutHooks,
        scope: RequestScope,
    ) -> GroupResult:
        """Works on a group until it is finished or something ended that. Raises what ends the run."""

    @abstractmethod
    async def evaluate(
        self, context: RolloutContext, sample: Sample, dataset: EvalDatasetConfig, hooks: RolloutHooks
    ) -> Execution:
        """One execution of an evaluation. Raises what ends the run."""

    @abstractmethod
    async def abort(self, scope: RequestScope) -> None:
        """The requests of a scope come back with what they have."""

    @abstractmethod
    async def pause(self, scope: RequestScope | None) -> None:
        """Ends every request; they go on at `resume`. Those of `scope` come back with what they have."""

    @abstractmethod
    def resume(self) -> None:
        """Requests go again."""

    @abstractmethod
    async def drain(self) -> None:
        """Waits until no order to end a request is on its way."""

    @abstractmethod
    async def num_left_behind(self) -> int:
        """Tasks and threads of user code that nobody waits for any more, and that still run."""


class Here(Episodes):
    """In this process, with its client; without one where no engine runs."""

    def __init__(self, client: EngineClient | None) -> None:
        self._client = client

    async def run(
        self,
        context: RolloutContext,
        group: Group,
        params: Mapping[str, Any],
        hooks: RolloutHooks,
        scope: RequestScope,
    ) -> GroupResult:
        """See `Episodes`. The scope is that of the task."""
        return await work_on(context, group, params, hooks)

    async def evaluate(
        self, context: RolloutContext, sample: Sample, dataset: EvalDatasetConfig, hooks: RolloutHooks
    ) -> Execution:
        """See `Episodes`."""
        params = eval_sampling_params(dataset)
        return await run_execution(context, [sample], params, hooks.generate, evaluation=True, dataset=dataset)

    async def abort(self, scope: RequestScope) -> None:
        """See `Episodes`."""
        if self._client is not None:
            await self._client.abort_scope(scope)

    async def pause(self, scope: RequestScope | None) -> None:
        """See `Episodes`."""
        if self._client is not None:
            await self._client.pause(scope)

    def resume(self) -> None:
        """See `Episodes`."""
        if self._client is not None:
            self._client.resume()

    async def drain(self) -> None:
        """See `Episodes`."""
        if self._client is not None:
            await self._client.drain()

    async def num_left_behind(self) -> int:
        """See `Episodes`."""
        return num_left_behind()


async def work_on(context: RolloutContext, group: Group, params: Mapping[str, Any], hooks: RolloutHooks) -> GroupResult:
    """Runs what is left of a group, and asks the user's filter about a finished one. Raises what ends the run.

    A filter of which the run took a request back has said nothing: the group is ABORTED, its executions stay finished.
    """
    result = await run_group(context, group, dict(params), hooks.generate)
    if hooks.dynamic_filter is None or result.outcome is not Outcome.FINISHED:
        return result
    finished, transcript = group_of(result.group), Transcript()
    token, num_pauses, seals = TRANSCRIPT.set(transcript), count_pauses(context), Seals(finished.samples)
    interrupted = dataclasses.replace(result, outcome=Outcome.ABORTED, reason="interrupted")
    try:
        verdict = await keep_group(hooks.dynamic_filter, context.args, without_unscored(finished.samples))
    except Exception as problem:
        if transcript.taken_back or was_interrupted(context, num_pauses, problem):
            return interrupted
        raise
    finally:
        transcript.close()
        TRANSCRIPT.reset(token)
    seals.check(finished.samples)
    return interrupted if transcript.taken_back else dataclasses.replace(result, verdict=verdict)


# What travels between the rollout and its workers: a group to be worked on, and what became of it.


@dataclass(frozen=True, slots=True)
class Work:
    """A group for a worker."""

    number: int
    """Of this work, by which it is cancelled."""
    scope: int | None
    """Number of the scope of its requests, in the rollout's process; None for an evaluation."""
    rollout_id: int | None
    params: Mapping[str, Any]
    """Sampling parameters."""
    group: Group
    """Packed: its numbers are arrays. Of an evaluation: one execution."""
    dataset: EvalDatasetConfig | None = None
    """Of an evaluation."""


@dataclass(frozen=True, slots=True)
class Done:
    """A group from a worker."""

    record: GroupRecord
    """The group: text and arrays that nobody has to look into before it is trained."""
    outcome: Outcome
    reason: str
    verdict: DynamicFilterOutput | None
    progress: Progress
    """Tokens and failures of this work."""


# Why a worker has no answer for a group, as `fleet` tells its own functions. Nobody else sees these.


class WorkerLost(Exception):
    """The worker of a group died."""

    def __init__(self, death: ActorDied) -> None:
        super().__init__(str(death))
        self.is_stall = isinstance(death, WorkerStalled)


class Guilty(Exception):
    """A group ended the processes that worked on it."""


class Ended(Exception):
    """The run ended the requests of a group that was between two workers."""
