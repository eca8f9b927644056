"""The generation functions of the public slime: sample and grade executions or groups, `GenerateState`, grading by
name, and the name of the fully asynchronous rollout.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from slime.core.errors import DataError, HookError
from slime.core.sample import Sample, Status
from slime.rewards.graders import GRADERS, Reward, make_grader
from slime.rewards.scores import Unscored
from slime.rollout.client.engine_client import REQUEST_SCOPE
from slime.rollout.context import current
from slime.rollout.execute import Execution, Outcome, all_or_first_error, run_execution
from slime.rollout.generate import rollout_sampling_params
from slime.rollout.loop import Output, generate_rollout
from slime.rollout.transcript import TRANSCRIPT
from slime.rollout.user_functions import RolloutHooks
from slime.settings import Args

# Sampling and grading of an execution or a group, for users' rollout functions that write their own loop.

_STATUS = {Outcome.ABORTED: Status.ABORTED}
"""Outcome of an unfinished execution -> status of its samples; FAILED for any other outcome."""


async def generate_and_rm(
    args: Args, sample: Sample | list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Samples and grades one execution; returns its sample, or a list of fan-out siblings.

    If the execution does not finish, the status is ABORTED or FAILED and there is no reward.
    """
    context, siblings = current(), [sample] if isinstance(sample, Sample) else list(sample)
    hook = RolloutHooks.load(args).generate
    execution = await run_execution(context, siblings, sampling_params, hook, evaluation=evaluation)
    samples = _with_status(execution)
    return samples[0] if len(samples) == 1 else samples


async def generate_and_rm_group(
    args: Args, group: Sequence[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample | list[Sample]]:
    """`generate_and_rm` for each execution of a group, concurrently."""
    return await all_or_first_error([generate_and_rm(args, one, sampling_params, evaluation) for one in group])


def _with_status(execution: Execution) -> list[Sample]:
    if execution.outcome is not Outcome.FINISHED:
        for sample in execution.samples:
            sample.status = _STATUS.get(execution.outcome, Status.FAILED)
            sample.failure = execution.reason if sample.status is Status.FAILED else ""
    return execution.samples


# `GenerateState`: tokenizer, sampling parameters and the end of a step, for functions of the public slime.


class GenerateState:
    """One instance per event loop, built from the current rollout. Raises `HookError` outside a rollout."""

    args: Args
    tokenizer: Any
    """The policy's tokenizer."""
    processor: None = None
    """Always None: there is no image processor."""
    semaphore: asyncio.Semaphore
    """Limits concurrent requests to what the engines serve; for functions that use their own HTTP client."""
    sampling_params: dict[str, Any]
    """Sampling parameters of training rollouts. Each function gets its own copy."""

    _of_loops: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, GenerateState]] = (
        weakref.WeakKeyDictionary()
    )

    def __new__(cls, args: Args) -> Self:
        context = current()
        known = cls._of_loops.get(context.loop)
        if isinstance(known, cls) and known.args is args:
            return known
        made = super().__new__(cls)
        made.args, made.tokenizer = args, context.tokenizer
        made.sampling_params = rollout_sampling_params(args)
        num_engines = len(context.client.engines()) if context.client is not None else 0
        made.semaphore = asyncio.Semaphore(args.sglang_server_concurrency * max(1, num_engines))
        cls._of_loops[context.loop] = made
        return made

    @property
    def aborted(self) -> bool:
        """Whether the run is aborting the calling execution. Reading True marks the execution as unfinished."""
        scope, transcript = REQUEST_SCOPE.get(), TRANSCRIPT.get()
        ended = scope is not None and scope.aborted
        if ended and transcript is not None:
            transcript.taken_back = True
        return ended


# The public name of the schedule `fully_async`, as a rollout function.
#
#     --rollout-function-path slime.rollout.fully_async.generate_rollout_fully_async         # the same as --fully-async
#
# The settings only read the name. The worker (`schedules.fully_async`) lives for the whole run, so a call for one step
# cannot replace it. Evaluation does not depend on the schedule and may be called.


def generate_rollout_fully_async(args: Args, rollout_id: int, data_source: Any, evaluation: bool = False) -> Output:
    """Evaluates as `loop.generate_rollout` does. Raises `HookError` for a training step."""
    if evaluation:
        return generate_rollout(args, rollout_id, data_source, evaluation=True)
    raise HookError(
        f"got a call of generate_rollout_fully_async for step {rollout_id}, because your own function wraps it and "
        "its worker outlives a step; give --fully-async alone, or derive a schedule from "
        "slime.rollout.schedules.fully_async.FullyAsync and name it with --rollout-schedule"
    )


# Users' functions call the built-in graders by their `--rm-type` names.
#
# Inside a rollout the call goes to the grader pool. Inside a grader process, where users' reward functions run, it
# calls the grader directly, because that process can already be killed.

LIMIT_S = 30.0
"""Time limit of a grader that is called directly."""


async def async_rm(args: Args, sample: Sample, **kwargs: Any) -> Reward:
    """The reward of one sample, from the grader named by its metadata `rm_type` or by `--rm-type`.

    Raises `DataError` if neither names one, or if the sample stays unscored.
    """
    try:
        pool = current().graders
    except HookError:
        return await _graded_here(args, sample)
    if pool is None:
        raise DataError("got a sample to grade without a grader; give --rm-type")
    score = await pool.score(sample)
    if isinstance(score, Unscored):
        raise DataError(f"sample {sample.index} has no reward: {score.reason}")
    sample.ungradable = score.ungradable
    return score.value


async def batched_async_rm(args: Args, samples: Sequence[Sample], **kwargs: Any) -> list[Reward]:
    """The rewards of several samples, in order. Raises as `async_rm` does."""
    return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))


async def _graded_here(args: Args, sample: Sample) -> Reward:
    rm_type = sample.metadata.get("rm_type") or args.rm_type
    if not rm_type:
        raise DataError("got a sample to grade without a grader; give --rm-type, or rm_type in its metadata")
    kind: Any = GRADERS.get(rm_type)
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    settings = {field.name: getattr(args, field.name) for field in fields if hasattr(args, field.name)}
    result = make_grader(rm_type, settings).grade(sample, LIMIT_S)
    return await result if inspect.isawaitable(result) else result
