"""`Episodes`: runs groups for a loop, in this or other processes. `LocalEpisodes`: runs them in this process.

Invariants
1. A cancelled call returns once all work on its group has ended, or has been left behind after a time limit.
2. `abort` ends the requests of one scope, wherever they run. `pause` ends all requests and holds back new ones.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.buffer.groups import GroupRecord, group_of
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
from slime.rollout.transcript import HOOK_CHANGED, TRANSCRIPT, Seals, Transcript
from slime.rollout.types import DynamicFilterOutput, Progress
from slime.rollout.user_functions import RolloutHooks, keep_group
from slime.settings.eval_config import EvalDatasetConfig

if TYPE_CHECKING:
    from slime.rollout.client.engine_client import EngineClient
    from slime.rollout.context import RolloutContext


class Episodes(ABC):
    """Interface for running a loop's groups."""

    @abstractmethod
    async def run(
        self,
        context: RolloutContext,
        group: Group,
        params: Mapping[str, Any],
        hooks: RolloutHooks,
        scope: RequestScope,
    ) -> GroupResult:
        """Runs a group until it is finished or interrupted. Raises errors that end the run."""

    @abstractmethod
    async def evaluate(
        self, context: RolloutContext, sample: Sample, dataset: EvalDatasetConfig, hooks: RolloutHooks
    ) -> Execution:
        """Runs one execution of an evaluation. Raises errors that end the run."""

    @abstractmethod
    async def abort(self, scope: RequestScope) -> None:
        """Cancels the requests of a scope."""

    @abstractmethod
    async def pause(self, scope: RequestScope | None) -> None:
        """Ends every request. Calls of `scope` are cancelled; all others continue after `resume`."""

    @abstractmethod
    def resume(self) -> None:
        """Resumes requests after `pause`."""

    @abstractmethod
    async def drain(self) -> None:
        """Waits until all aborts are delivered."""

    @abstractmethod
    async def num_left_behind(self) -> int:
        """Returns the number of user tasks and threads that are still running but no longer awaited."""


class LocalEpisodes(Episodes):
    """Runs groups in this process. `client`: None if no engine is running."""

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
        return await work_on(context, group, params, hooks)

    async def evaluate(
        self, context: RolloutContext, sample: Sample, dataset: EvalDatasetConfig, hooks: RolloutHooks
    ) -> Execution:
        params = eval_sampling_params(dataset)
        return await run_execution(context, [sample], params, hooks.generate, evaluation=True, dataset=dataset)

    async def abort(self, scope: RequestScope) -> None:
        if self._client is not None:
            await self._client.abort_scope(scope)

    async def pause(self, scope: RequestScope | None) -> None:
        if self._client is not None:
            await self._client.pause(scope)

    def resume(self) -> None:
        if self._client is not None:
            self._client.resume()

    async def drain(self) -> None:
        if self._client is not None:
            await self._client.drain()

    async def num_left_behind(self) -> int:
        return num_left_behind()


async def work_on(context: RolloutContext, group: Group, params: Mapping[str, Any], hooks: RolloutHooks) -> GroupResult:
    """Runs the unfinished executions of a group, then the user's filter if the group is finished.

    If the run cancelled one of the filter's requests, the group is ABORTED, but its executions stay finished. Raises
    errors that end the run.
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
    num = seals.mark_changed(finished.samples)
    if transcript.taken_back:
        return interrupted
    reason = result.refusal or (HOOK_CHANGED if num else "")
    return dataclasses.replace(result, verdict=verdict, num_refused=result.num_refused + num, refusal=reason)


@dataclass(frozen=True, slots=True)
class Work:
    """A group for a worker to run."""

    number: int
    """Identifies the work for `cancel`."""
    scope: int | None
    """The number of its `RequestScope` in the rollout process; None during evaluation."""
    rollout_id: int | None
    params: Mapping[str, Any]
    """Sampling parameters."""
    group: Group
    """Packed, so its numbers are arrays. During evaluation, it has a single execution."""
    dataset: EvalDatasetConfig | None = None
    """The dataset that is evaluated; None during training."""


@dataclass(frozen=True, slots=True)
class Done:
    """A worker's result."""

    record: GroupRecord
    """Text and arrays, which the rollout process does not have to decode before training."""
    outcome: Outcome
    reason: str
    verdict: DynamicFilterOutput | None
    progress: Progress
    """Counts the tokens and failures of this work."""
    num_refused: int = 0
    """See `GroupResult`."""
    refusal: str = ""
    rewards: tuple[float, ...] = ()
