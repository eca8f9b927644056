"""One group from prompt to rewards: its executions run concurrently, each ends in exactly one outcome.

Outcomes of an execution, and what it leaves behind for a later try
- finished: samples that are complete and scored.
- aborted: interrupted, by the loop or by the engine; its tokens stay with `--partial-rollout`, otherwise it is as
  before the try. So does one of which the run ended a request, and whose code then raised or gave up, whatever it
  raised: an SDK wraps the abort in an error of its own.
- failed, unscored, expired, rejected: engine, grader or user code failed, whatever it raised, or stood still; it is as
  before the try, and `reason` says why. Never a reward of zero.

Consumes: one group and what earlier tries left of it. Produces: a `GroupResult`. Waits for: its executions, each of
which waits for the user's or the default generate function, as long as that makes progress (`supervise`), and then for
the grader pool, whose limits are its own. Is woken by: the end of an execution, an error that ends the run, or the
cancellation of its task (`group_loop`).

A group is finished when all its executions are, or when so few are unscored that the others can be compared without
them (`can_be_compared`): those stay, without a reward, and count in no statistics. A later try in the same step runs
only the executions that are not, so what is done is not done twice.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from slime.buffer.groups import reset
from slime.buffer.records import Held
from slime.core.blame import raised_by_user
from slime.core.errors import (
    ConfigError,
    DataError,
    DeadlineExceeded,
    HookError,
    HookExited,
    LedgerError,
    NumericsError,
    RequestRejected,
)
from slime.core.sample import NOT_SAMPLED, Group, Sample, Status
from slime.rewards.types import Score, Unscored, reason_kind
from slime.rollout.answers import ANSWERS
from slime.rollout.client import REQUEST_SCOPE
from slime.rollout.context import RolloutContext
from slime.rollout.hooks import Hook, call_generate, call_sample_hooks, load, name_of
from slime.rollout.progress import waiting
from slime.rollout.sampling import seeded
from slime.rollout.scope import HANDBACK, Handback
from slime.rollout.supervise import END_LIMIT_S, end_tasks, supervised
from slime.rollout.traced import traced, traced_execution
from slime.rollout.types import DynamicFilterOutput

T = TypeVar("T")

logger = logging.getLogger(__name__)

FATAL = (ConfigError, HookError, LedgerError, NumericsError)
"""Mistakes that no second try can mend: they end the run."""
FINISHED = (Status.COMPLETED, Status.TRUNCATED)


class Outcome(str, Enum):
    """How an execution, or a group, ended."""

    FINISHED = "finished"
    ABORTED = "aborted"
    UNSCORED = "unscored"
    FAILED = "failed"
    EXPIRED = "expired"
    """A request made no progress within `--request-timeout-s`, or user code none within `--execution-timeout-s`: not
    tried again in this step."""
    REJECTED = "rejected"
    """The engine can never serve it (HTTP 4xx): not tried again."""


SEVERITY = (Outcome.FINISHED, Outcome.ABORTED, Outcome.UNSCORED, Outcome.FAILED, Outcome.EXPIRED, Outcome.REJECTED)
"""The worst outcome of its executions is the group's."""


@dataclass(frozen=True, slots=True)
class Execution:
    """What one execution left."""

    samples: list[Sample]
    """Complete if finished, otherwise what a later try starts from."""
    outcome: Outcome
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What one group left."""

    group: Held
    """Its record where another process worked on it."""
    outcome: Outcome
    reason: str = ""
    """Why the worst execution did not finish."""
    verdict: DynamicFilterOutput | None = None
    """Of the user's filter on a finished group; None without a filter."""


def mask_older(sample: Sample) -> None:
    """Leaves the tokens of its newest weights to training (`--mask-offpolicy-in-partial-rollout`)."""
    num, mask = sample.response_length, sample.loss_mask
    versions, mask = sample.token_versions or [NOT_SAMPLED] * num, [1] * num if mask is None else mask
    newest = max(versions, default=NOT_SAMPLED)
    sample.loss_mask = [m * (v == newest) for m, v in zip(mask, versions, strict=True)]


def is_finished(samples: Sequence[Sample], *, scored: bool) -> bool:
    """Whether nothing is left to do: every sibling complete and, if `scored`, with a reward."""
    return all(s.status in FINISHED and (s.reward is not None or not scored) for s in samples)


def _set_score(sample: Sample, score: Score) -> str:
    """Writes a score into the sample; returns the reason if there is none."""
    if isinstance(score, Unscored):
        sample.reward, sample.unscored = None, score.reason
        return score.reason
    sample.reward = score.value
    sample.unscored = ""
    return ""


async def score_samples(context: RolloutContext, samples: Sequence[Sample], *, group: bool) -> str:
    """Grades what has no reward yet; returns the first reason for a missing score, or an empty string."""
    missing = list(samples) if group else [s for s in samples if s.reward is None]
    if not missing:
        return ""
    if context.graders is None:
        raise ConfigError(
            f"sample {missing[0].index} needs a reward, but no grader is set; give --rm-type or --custom-rm-path"
        )
    with waiting():  # the pool has limits
        if group:
            scores = await context.graders.score_group(missing)
        else:
            scores = await asyncio.gather(*(context.graders.score(s) for s in missing))
    reasons = [_set_score(sample, score) for sample, score in zip(missing, scores, strict=True)]
    return next((reason for reason in reasons if reason), "")


async def run_execution(
    context: RolloutContext,
    siblings: list[Sample],
    params: dict[str, Any],
    hook: Hook,
    *,
    evaluation: bool = False,
    attempts: int = 0,
) -> Execution:
    """Generates and, unless the whole group is graded at once, scores one execution. Raises `FATAL` errors only.

    `attempts`: how often its group was issued before, for the trace.
    """
    one = siblings[0]
    with traced_execution(group=one.group_index, index=one.index, attempts=attempts, evaluation=evaluation):
        return await _run_execution(context, siblings, params, hook, evaluation=evaluation)


async def _run_execution(
    context: RolloutContext, siblings: list[Sample], params: dict[str, Any], hook: Hook, *, evaluation: bool
) -> Execution:
    args = context.args
    group_rm = args.group_rm and not evaluation
    if is_finished(siblings, scored=not group_rm):
        return Execution(siblings, Outcome.FINISHED)
    sample = siblings[0] if len(siblings) == 1 else reset(siblings[0])
    sample.session_id = sample.session_id or uuid.uuid4().hex
    before, handback = sample.copy(), Handback()
    HANDBACK.set(handback)  # of this execution's task, or until the next one in it
    ANSWERS.set([])
    try:
        if sample.status not in FINISHED:
            if sample.generate_function_path:
                hook = load(sample.generate_function_path, "generate") or hook
            fresh = seeded(args, params, sample.index or 0)
            with traced("generate", function=name_of(hook)):
                result = await supervised(
                    _by_user(context, hook, sample, fresh, evaluation=evaluation),
                    what=f"execution {sample.index} of group {sample.group_index} in {name_of(hook)}",
                    limit_s=args.execution_timeout_s,
                )
        else:
            result = [sample]
        statuses = {s.status for s in result}
        if Status.FAILED in statuses and handback.happened:
            return Execution([before], Outcome.ABORTED, "interrupted")
        if Status.FAILED in statuses:
            reason = next(s.failure for s in result if s.status is Status.FAILED)
            return Execution([before], Outcome.FAILED, context.progress.failed(reason or "no reason given"))
        if not statuses <= set(FINISHED):
            scope = REQUEST_SCOPE.get()
            if Status.PENDING in statuses and not (scope and scope.aborted):
                raise HookError(
                    f"got sample {sample.index} of group {sample.group_index} PENDING from the generate function, so "
                    "nothing says whether it is done; do: set sample.status (Status.COMPLETED or Status.TRUNCATED)"
                )
            kept = result if args.partial_rollout and len(result) == 1 and not evaluation else [reset(before)]
            return Execution(kept, Outcome.ABORTED, "interrupted")
        for one in result if args.mask_offpolicy_in_partial_rollout and not evaluation else ():
            mask_older(one)
        context.progress.tokens += sum(s.effective_response_length for s in result)
        if group_rm:
            return Execution(result, Outcome.FINISHED)
        as_group = args.group_rm and args.custom_rm_path is not None and sample.custom_rm_path is None
        with traced("grade", samples=len(result)):
            reason = await score_samples(context, result, group=as_group)  # evaluation: the function wants a list
        if reason:
            context.progress.failed(reason)
        return Execution(result, Outcome.UNSCORED if reason else Outcome.FINISHED, reason)
    except FATAL:
        raise
    except Exception as problem:
        if handback.happened:
            logger.info("execution %s of group %s was interrupted", sample.index, sample.group_index, exc_info=problem)
            return Execution([before], Outcome.ABORTED, "interrupted")
        return _failed(context, before, problem)


async def _by_user(
    context: RolloutContext, hook: Hook, sample: Sample, params: dict[str, Any], *, evaluation: bool
) -> list[Sample]:
    """What the generate function makes of a sample, through the sample hooks if it is finished."""
    args, step = context.args, context.rollout_id
    result = await call_generate(hook, args, sample, params, evaluation=evaluation)
    if args.rollout_sample_hook_path and all(s.status in FINISHED for s in result):
        result = [await call_sample_hooks(args, s, rollout_id=step, evaluation=evaluation) for s in result]
    return result


def _failed(context: RolloutContext, before: Sample, problem: Exception) -> Execution:
    """What an error means that is not the end of the run."""
    match problem:
        case RequestRejected():
            return Execution([before], Outcome.REJECTED, str(problem))
        case DeadlineExceeded():
            return Execution([before], Outcome.EXPIRED, context.progress.failed(str(problem)))
    logger.warning("execution %s of group %s failed", before.index, before.group_index, exc_info=problem)
    exited = isinstance(problem, HookExited)  # its text has kind and place
    reason = str(problem) if exited else f"{type(problem).__name__}: {problem}{raised_by_user(problem)}"
    return Execution([before], Outcome.FAILED, context.progress.failed(reason))


async def all_or_first_error(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs coroutines concurrently, results in order. On an error the others are ended first (`end_tasks`)."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await end_tasks(tasks, 2 * END_LIMIT_S)


def by_execution(group: Group) -> list[list[Sample]]:
    """The samples of a group, siblings together, in the order of first appearance."""
    executions: dict[int | None, list[Sample]] = {}
    for sample in group.samples:
        executions.setdefault(sample.index, []).append(sample)
    return list(executions.values())


def can_be_compared(group: Group) -> bool:
    """Whether the group stands without its unscored executions: half of them, and two where there are two, are scored.

    An execution with an unscored sibling is unscored altogether.
    """
    executions = by_execution(group)
    unscored = [siblings for siblings in executions if any(s.reward is None for s in siblings)]
    for sample in (s for siblings in unscored for s in siblings):
        sample.reward = None
        sample.unscored = sample.unscored or "a sibling is unscored"
    return len(executions) - len(unscored) >= min(len(executions), max(2, (len(executions) + 1) // 2))


async def run_group(context: RolloutContext, group: Group, params: dict[str, Any], hook: Hook) -> GroupResult:
    """Runs what is left of a group. Raises `FATAL` errors only; the other executions are then cancelled."""
    again = group.attempts
    executions = await all_or_first_error(
        [run_execution(context, e, params, hook, attempts=again) for e in by_execution(group)]
    )
    worst = max(executions, key=lambda e: SEVERITY.index(e.outcome))
    finished = group.with_samples([s for e in executions for s in e.samples])
    if worst.outcome is Outcome.UNSCORED:
        if can_be_compared(finished):
            return GroupResult(finished, Outcome.FINISHED)
        left = [[reset(e.samples[0])] if e.outcome is Outcome.UNSCORED else e.samples for e in executions]
        return GroupResult(group.with_samples([s for siblings in left for s in siblings]), worst.outcome, worst.reason)
    if worst.outcome is not Outcome.FINISHED or not context.args.group_rm:
        return GroupResult(finished, worst.outcome, worst.reason)
    try:
        reason = await score_samples(context, finished.samples, group=True)
    except DataError as problem:
        return GroupResult(finished, Outcome.FAILED, str(problem))
    if not reason or can_be_compared(finished):
        return GroupResult(finished, Outcome.FINISHED)
    for sample in finished.samples:
        sample.reward = None  # one call graded them all: all are graded again
    return GroupResult(finished, Outcome.UNSCORED, reason)


def failure_kind(result: GroupResult) -> str:
    """The outcome and reason as one name for ledger and metrics."""
    return f"{result.outcome.value}_{reason_kind(result.reason)}"
