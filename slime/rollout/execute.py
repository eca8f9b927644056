"""Runs one group from prompt to rewards. Its executions run concurrently, and each has exactly one outcome.

Outcomes of an execution, and the state from which a later attempt starts
- finished: the samples are complete and scored.
- aborted: the loop or the engine interrupted the execution. If the run cancelled one of its requests
  (`Transcript.taken_back`), the execution is aborted regardless of what its code, hooks or graders return or raise: the
  score of a partial response does not count, and SDKs wrap the cancellation in their own errors. If the code itself
  sets ABORTED, `--partial-rollout` keeps the tokens; otherwise the sample is restored to its state before the attempt.
- failed, unscored, expired, rejected, deadly: engine, grader or user code failed or stalled; `reason` says why. The
  sample is restored to its state before the attempt and never gets a reward of zero. A finished sample is also unscored
  if a trained token was not sampled as claimed (law 1); its group continues without it.

An execution waits for the generate function while it makes progress (`supervised`), and then for the grader pool, which
has its own limits. `group_loop` ends an execution by cancelling its task.

A group is finished when all its executions are finished, or when enough of them are scored for a comparison
(`can_be_compared`). The others then have no reward and are excluded from statistics. Another attempt in the same step
runs only the unfinished executions. Refused text never ends a run: see `Outcome.REFUSED`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import uuid
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from slime.buffer.groups import GroupOrRecord, note_changes, reset
from slime.core.blame import asks_again, causes, raised_by_user
from slime.core.engine_interface import ASK_AGAIN
from slime.core.errors import (
    ConfigError,
    DataError,
    DeadlineExceeded,
    DeadlyRequest,
    HookError,
    HookExited,
    LedgerError,
    NumericsError,
    RequestRejected,
    SampledPlaceholder,
    TakenBack,
)
from slime.core.sample import NOT_SAMPLED, Group, Sample, Status
from slime.rewards.scores import Score, Unscored, reason_kind
from slime.rollout.client.engine_client import REQUEST_SCOPE
from slime.rollout.context import EXECUTION, RolloutContext, RunningExecution
from slime.rollout.filters import execution_rewards, has_grader
from slime.rollout.generate import LIMITS, Limits, seeded
from slime.rollout.guard import END_LIMIT_S, end_tasks, supervised, waiting
from slime.rollout.sample_metrics import count_empty_turns, count_siblings
from slime.rollout.traces import traced, traced_execution
from slime.rollout.transcript import OTHERWISE_SAMPLED, TRANSCRIPT, Transcript, is_refused, not_sampled
from slime.rollout.types import DynamicFilterOutput
from slime.rollout.user_functions import Hook, call_generate, call_sample_hooks, load, name_of
from slime.settings import Args
from slime.settings.conditions import trains_given_tokens
from slime.settings.eval_config import EvalDatasetConfig

T = TypeVar("T")

logger = logging.getLogger(__name__)

FATAL = (ConfigError, HookError, LedgerError, NumericsError)
"""Errors that a retry cannot fix; they end the run."""
FINISHED = (Status.COMPLETED, Status.TRUNCATED)


class Outcome(str, Enum):
    FINISHED = "finished"
    ABORTED = "aborted"
    UNSCORED = "unscored"
    FAILED = "failed"
    EXPIRED = "expired"
    """A request made no progress within `--request-timeout-s`, or user code made none within `--execution-timeout-s`.
    Not retried in this step.
    """
    REJECTED = "rejected"
    """The engine can never serve the request (HTTP 4xx)."""
    DEADLY = "deadly"
    """Engines died while working on the request."""
    REFUSED = "refused"
    """Of a group: too few executions can be compared, because trained tokens of the others are not as sampled. If that
    happens in the last attempt, the group joins its batch and is not trained on.
    """


GIVEN_UP = (Outcome.EXPIRED, Outcome.REJECTED, Outcome.DEADLY)
"""Outcomes that another attempt in this step would repeat."""

SEVERITY = (Outcome.FINISHED, Outcome.UNSCORED, Outcome.ABORTED, Outcome.FAILED, *GIVEN_UP)
"""From best to worst. A group gets the worst outcome of its executions, but may finish with some unscored."""


@dataclass(frozen=True, slots=True)
class Execution:
    samples: list[Sample]
    """Complete if finished; otherwise the state from which a later attempt starts."""
    outcome: Outcome
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GroupResult:
    group: GroupOrRecord
    """The group, as a record if another process ran it."""
    outcome: Outcome
    reason: str = ""
    verdict: DynamicFilterOutput | None = None
    """The user filter's verdict on a finished group; None without a filter."""
    num_refused: int = 0
    """Number of samples that this attempt refused because they are not as sampled."""
    refusal: str = ""
    """Why the first of them was refused."""
    rewards: tuple[float, ...] = ()
    """Of a finished group: the mean reward of each scored execution."""


def mask_older(sample: Sample) -> None:
    """Masks tokens older than the sample's newest weights (`--mask-offpolicy-in-partial-rollout`)."""
    num, mask = sample.response_length, sample.loss_mask
    versions, mask = sample.token_versions or [NOT_SAMPLED] * num, [1] * num if mask is None else mask
    newest = max(versions, default=NOT_SAMPLED)
    sample.loss_mask = [m * (v == newest) for m, v in zip(mask, versions, strict=True)]


def is_finished(samples: Sequence[Sample], *, scored: bool) -> bool:
    """Returns whether every sibling is complete and, if `scored`, has a reward."""
    return all(s.status in FINISHED and (s.reward is not None or not scored) for s in samples)


def _set_score(sample: Sample, score: Score) -> str:
    """Stores a score and the reward function's notes in the sample. Returns why the sample is unscored, or ''."""
    if score.metadata is not None:
        sample.metadata = score.metadata
    if isinstance(score, Unscored):
        sample.reward, sample.unscored, sample.ungradable = None, score.reason, ""
        return score.reason
    sample.reward, sample.unscored, sample.ungradable = score.value, "", score.ungradable
    return ""


async def score_samples(
    context: RolloutContext, samples: Sequence[Sample], *, group: bool, evaluation: bool = False
) -> str:
    """Grades samples that have no reward, or all if `group`. Returns the first reason for a missing score, or ''.

    Without a grader, the reward of a sample with token rewards is 0, because nothing scores its end; in an evaluation,
    it is the sum of its token rewards.
    """
    for sample in samples:
        if sample.reward is None and sample.token_rewards is not None and not has_grader(context.args, sample):
            sample.reward = 0.0
            if evaluation:
                sample.reward = sample.total_reward()
    missing = list(samples) if group else [s for s in samples if s.reward is None]
    if not missing:
        return ""
    if context.graders is None:
        raise ConfigError(
            f"sample {missing[0].index} needs a reward, but there is no grader; set --rm-type or --custom-rm-path"
        )
    with waiting():  # the pool has its own limits
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
    dataset: EvalDatasetConfig | None = None,
    attempts: int = 0,
) -> Execution:
    """Generates one execution, and scores it unless its group is graded together. Raises only `FATAL` errors.

    `dataset`: the evaluation dataset whose limits apply. `attempts`: how often the group was issued before (recorded in
    the trace).
    """
    siblings = [reset(siblings[0])] if any(map(is_refused, siblings)) else siblings
    one = siblings[0]
    if is_finished(siblings, scored=not graded_together(context, evaluation)):
        reason = "" if evaluation else _given(context.args, siblings)
        return Execution(siblings, Outcome.UNSCORED if reason else Outcome.FINISHED, reason)
    sample = one if len(siblings) == 1 else reset(one)
    sample.session_id = sample.session_id or uuid.uuid4().hex
    before, transcript = sample.copy(), Transcript.behind(sample)
    token, num_pauses = TRANSCRIPT.set(transcript), count_pauses(context)
    limits = Limits.of(context.args, transcript, evaluation=evaluation, dataset=dataset)
    limited = LIMITS.set(limits)
    try:
        with traced_execution(group=one.group_index, index=one.index, attempts=attempts, evaluation=evaluation):
            ended = await _generate_and_score(context, sample, before, params, hook, evaluation=evaluation)
    except FATAL as problem:
        if not (transcript.taken_back and isinstance(problem, HookError)):  # interrupted code may have returned nothing
            raise
        ended = _interrupted(before, problem)
    except Exception as problem:
        interrupted = transcript.taken_back or was_interrupted(context, num_pauses, problem)
        ended = _interrupted(before, problem) if interrupted else _failed(before, problem)
    finally:
        transcript.close()
        TRANSCRIPT.reset(token)
        LIMITS.reset(limited)
    if ended.outcome is Outcome.ABORTED:
        for made in ended.samples:
            note_changes(made, before)
        return ended
    if transcript.taken_back or _grader_was_interrupted(context, num_pauses, ended):
        return _interrupted(before)
    for made in ended.samples:
        note_changes(made, before)
    if ended.outcome in (Outcome.FINISHED, Outcome.UNSCORED):
        count_empty_turns(ended.samples[0], limits.spent)
        if len(ended.samples) > 1:
            count_siblings(ended.samples, transcript.of_siblings(ended.samples))
    if ended.reason:
        context.progress.failed(ended.reason)
    return ended


async def _generate_and_score(
    context: RolloutContext,
    sample: Sample,
    before: Sample,
    params: dict[str, Any],
    hook: Hook,
    *,
    evaluation: bool,
) -> Execution:
    """Runs one attempt. `before`: the sample from which a later attempt starts."""
    args, result = context.args, [sample]
    if sample.status not in FINISHED:
        if sample.generate_function_path:
            hook = load(sample.generate_function_path, "generate") or hook
        fresh = seeded(args, params, sample.index or 0)
        running = EXECUTION.set(RunningExecution(dict(fresh), sample.prompt))  # user code may change its own
        try:
            with traced("generate", function=name_of(hook)):
                result = await supervised(
                    _by_user(context, hook, sample, fresh, evaluation=evaluation),
                    what=f"execution {sample.index} of group {sample.group_index} in {name_of(hook)}",
                    limit_s=args.execution_timeout_s,
                )
        finally:
            EXECUTION.reset(running)
    statuses = {s.status for s in result}
    if Status.FAILED in statuses:
        reason = next(s.failure for s in result if s.status is Status.FAILED)
        logger.warning("execution %s of group %s failed: %s", sample.index, sample.group_index, reason or "no reason")
        return Execution([before], Outcome.FAILED, reason or "no reason given")
    untrue = "" if evaluation else _not_as_sampled(args, result)
    if not statuses <= set(FINISHED):
        _require_status(sample, statuses)
        kept = args.partial_rollout and len(result) == 1 and not evaluation and not untrue
        return Execution(result if kept else [reset(before)], Outcome.ABORTED, "interrupted")
    if untrue:
        return Execution(result, Outcome.UNSCORED, untrue)
    for one in result if args.mask_offpolicy_in_partial_rollout and not evaluation else ():
        mask_older(one)
    context.progress.tokens += sum(s.effective_response_length for s in result)
    if graded_together(context, evaluation):
        return Execution(result, Outcome.FINISHED)
    as_group = args.group_rm and args.custom_rm_path is not None and sample.custom_rm_path is None
    with traced("grade", samples=len(result)):
        # a group grader takes a list
        reason = await score_samples(context, result, group=as_group, evaluation=evaluation)
    return Execution(result, Outcome.UNSCORED if reason else Outcome.FINISHED, reason)


def _given(args: Args, siblings: Sequence[Sample]) -> str:
    """Returns why finished samples, as a data source may issue them, must not be trained on, or ''. If there is a
    reason, marks them unscored.
    """
    return _refused(siblings, () if trains_given_tokens(args) else map(not_sampled, siblings))


def _refused(samples: Sequence[Sample], problems: Iterable[str]) -> str:
    """Returns the first problem, or '' if all are empty. If there is one, marks the samples unscored."""
    reason = next(filter(None, problems), "")
    for sample in samples if reason else ():
        sample.reward, sample.unscored = None, reason
    return reason


def graded_together(context: RolloutContext, evaluation: bool) -> bool:
    """Returns whether all executions of a group are graded together at the end."""
    return context.args.group_rm and not evaluation


def count_pauses(context: RolloutContext) -> int:
    return 0 if context.client is None else context.client.num_pauses


def _not_as_sampled(args: Args, samples: Sequence[Sample]) -> str:
    """Returns why the samples must not be trained on (law 1), or ''. If there is a reason, marks them unscored."""
    transcript = TRANSCRIPT.get()
    assert transcript is not None, "an execution has a transcript"
    check = (lambda _: "") if trains_given_tokens(args) else not_sampled
    complete = [sample for sample in samples if sample.status in FINISHED]
    if reason := _refused(samples, [*map(transcript.problem, samples), *map(check, complete)]):
        logger.warning("execution %s of group %s is refused: %s", samples[0].index, samples[0].group_index, reason)
    return reason


def _require_status(sample: Sample, statuses: set[Status]) -> None:
    """Raises `HookError` if a sample is still PENDING although it was not interrupted."""
    scope, transcript = REQUEST_SCOPE.get(), TRANSCRIPT.get()
    interrupted = (scope is not None and scope.aborted) or (transcript is not None and transcript.taken_back)
    if Status.PENDING in statuses and not interrupted:
        raise HookError(
            f"the generate function left sample {sample.index} of group {sample.group_index} PENDING; set "
            "sample.status to Status.COMPLETED or Status.TRUNCATED"
        )


def was_interrupted(context: RolloutContext, num_pauses: int, problem: BaseException) -> bool:
    """Returns whether an error comes from a request that the run cancelled.

    The request was sent either by the client, possibly in a task shared by executions, or by a user's HTTP client and
    interrupted by a pause since `num_pauses` was read (`compat/sglang_aborted_requests.py`).
    """
    paused = count_pauses(context) > num_pauses
    return any(isinstance(one, TakenBack) for one in causes(problem)) or (paused and asks_again(problem))


def _grader_was_interrupted(context: RolloutContext, num_pauses: int, ended: Execution) -> bool:
    """Returns whether a score is missing because the run cancelled a grader process's request."""
    asked = ended.outcome is Outcome.UNSCORED and ASK_AGAIN in ended.reason
    return asked and count_pauses(context) > num_pauses


async def _by_user(
    context: RolloutContext, hook: Hook, sample: Sample, params: dict[str, Any], *, evaluation: bool
) -> list[Sample]:
    """Calls the generate function, then the sample hooks if the samples are complete."""
    args, step = context.args, context.rollout_id
    result = await call_generate(hook, args, sample, params, evaluation=evaluation)
    if args.rollout_sample_hook_path and all(s.status in FINISHED for s in result):
        result = [await call_sample_hooks(args, s, rollout_id=step, evaluation=evaluation) for s in result]
    return result


def _interrupted(before: Sample, problem: Exception | None = None) -> Execution:
    logger.info("execution %s of group %s was interrupted", before.index, before.group_index, exc_info=problem)
    return Execution([before], Outcome.ABORTED, "interrupted")


def _failed(before: Sample, problem: Exception) -> Execution:
    """Returns the outcome of an execution that raised an error."""
    if deadly := next((one for one in causes(problem) if isinstance(one, DeadlyRequest)), None):
        return Execution([before], Outcome.DEADLY, f"{deadly} (execution {before.index} of group {before.group_index})")
    match problem:
        case SampledPlaceholder():  # an earlier attempt may have sampled it
            return Execution([reset(before)], Outcome.FAILED, str(problem))
        case RequestRejected():
            return Execution([before], Outcome.REJECTED, str(problem))
        case DeadlineExceeded():
            return Execution([before], Outcome.EXPIRED, str(problem))
    logger.warning("execution %s of group %s failed", before.index, before.group_index, exc_info=problem)
    exited = isinstance(problem, HookExited)  # its message already names the error type and place
    reason = str(problem) if exited else f"{type(problem).__name__}: {problem}{raised_by_user(problem)}"
    transcript = TRANSCRIPT.get()
    if transcript is not None and transcript.refusal and transcript.refusal not in reason:
        reason += f"; the first answer with an error to its requests: {transcript.refusal}"
    return Execution([before], Outcome.FAILED, reason)


async def all_or_first_error(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs coroutines concurrently and returns their results in order. On the first error, cancels the others
    (`end_tasks`).
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await end_tasks(tasks, 2 * END_LIMIT_S)


def by_execution(group: Group) -> list[list[Sample]]:
    """Groups samples by execution, in order of first appearance."""
    executions: dict[int | None, list[Sample]] = {}
    for sample in group.samples:
        executions.setdefault(sample.index, []).append(sample)
    return list(executions.values())


def can_be_compared(group: Group) -> bool:
    """Returns whether enough executions are scored: at least half, and at least two unless the group has only one.

    Marks the siblings of an unscored sample as unscored.
    """
    executions = by_execution(group)
    unscored = [siblings for siblings in executions if any(s.reward is None for s in siblings)]
    for sample in (s for siblings in unscored for s in siblings):
        sample.reward = None
        sample.unscored = sample.unscored or "a sibling is unscored"
    return len(executions) - len(unscored) >= min(len(executions), max(2, (len(executions) + 1) // 2))


async def run_group(context: RolloutContext, group: Group, params: dict[str, Any], hook: Hook) -> GroupResult:
    """Runs the unfinished executions of a group. Raises only `FATAL` errors, after cancelling the other executions."""
    again = group.attempts
    executions = await all_or_first_error(
        [run_execution(context, e, params, hook, attempts=again) for e in by_execution(group)]
    )
    result = await _result_of(context, group, executions)
    refused = [e for e in executions if e.reason.startswith(OTHERWISE_SAMPLED)]
    num = sum(len(e.samples) for e in refused)
    return dataclasses.replace(result, num_refused=num, refusal=refused[0].reason) if refused else result


async def _result_of(context: RolloutContext, group: Group, executions: Sequence[Execution]) -> GroupResult:
    """Returns the result of a group whose executions have ended, and grades them together with `--group-rm`."""
    worst = max(executions, key=lambda e: SEVERITY.index(e.outcome))
    if worst.outcome not in (Outcome.FINISHED, Outcome.UNSCORED):
        return _left_of(group, executions, worst)
    reason, graded = "", [s for e in executions if e.outcome is Outcome.FINISHED for s in e.samples]
    num_pauses = count_pauses(context)
    if context.args.group_rm and graded:
        try:
            reason = await score_samples(context, graded, group=True)
        except DataError as problem:
            worst = Execution([], Outcome.FAILED, str(problem))
            return _left_of(group, executions, worst)
        if _grader_was_interrupted(context, num_pauses, Execution([], Outcome.UNSCORED, reason)):
            for sample in graded:
                sample.reward, sample.unscored = None, ""
            return _left_of(group, executions, Execution([], Outcome.ABORTED, "interrupted"))
    finished = group.with_samples([s for e in executions for s in e.samples])
    if can_be_compared(finished):
        return GroupResult(finished, Outcome.FINISHED, rewards=_numbers(context.args, finished))
    unscored = [s for e in executions if e.outcome is Outcome.UNSCORED for s in e.samples]
    if unscored and all(map(is_refused, unscored)) and not reason:
        return GroupResult(finished, Outcome.REFUSED, worst.reason)
    if context.args.group_rm:
        for sample in graded:
            sample.reward = None  # one call grades the whole group, so all are graded again
    return _left_of(group, executions, Execution([], Outcome.UNSCORED, worst.reason or reason))


def _numbers(args: Args, group: Group) -> tuple[float, ...]:
    """Returns the rewards of a group's executions; none if they are dicts for the user's own post-processing."""
    if args.reward_key is None and any(isinstance(sample.reward, dict) for sample in group.samples):
        return ()
    return tuple(execution_rewards(args, list(group.samples)))


def _left_of(group: Group, executions: Sequence[Execution], worst: Execution) -> GroupResult:
    """Returns the unfinished group. Unscored executions start over, because some of their tokens may not have been
    sampled.
    """
    left = [[reset(e.samples[0])] if e.outcome is Outcome.UNSCORED else e.samples for e in executions]
    return GroupResult(group.with_samples([s for siblings in left for s in siblings]), worst.outcome, worst.reason)


def without_refused(group: Group) -> Group:
    """Returns a REFUSED group for its next attempt: executions that were refused start over."""
    left = [[reset(e[0])] if any(map(is_refused, e)) else e for e in by_execution(group)]
    return group.with_samples([s for siblings in left for s in siblings])


def untrained(group: Group) -> Group:
    """Marks all samples of a REFUSED group unscored, after its last attempt."""
    for sample in group.samples:
        sample.reward, sample.unscored = None, sample.unscored or "too few executions of its group are as sampled"
    return group


def failure_kind(result: GroupResult) -> str:
    """Combines outcome and reason into a name for the ledger and the metrics."""
    return f"{result.outcome.value}_{reason_kind(result.reason)}"
