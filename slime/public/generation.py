"""Generation as functions of the public slime ask for it: sampled and graded executions and groups, the state that they
read, grading by name, and the name of the fully asynchronous rollout.
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

# An execution, or a group, for rollout functions of the user's that make their own loop: sampled and graded.

_STATUS = {Outcome.ABORTED: Status.ABORTED}
"""Of a sample whose execution did not finish; any other has failed."""


async def generate_and_rm(
    args: Args, sample: Sample | list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """A finished sample with its reward, or the siblings of a fan-out. One that did not finish says so by its status,
    ABORTED or FAILED, and has no reward.
    """
    context, siblings = current(), [sample] if isinstance(sample, Sample) else list(sample)
    hook = RolloutHooks.load(args).generate
    execution = await run_execution(context, siblings, sampling_params, hook, evaluation=evaluation)
    samples = _with_status(execution)
    return samples[0] if len(samples) == 1 else samples


async def generate_and_rm_group(
    args: Args, group: Sequence[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample | list[Sample]]:
    """The same of each execution of a group, all at once."""
    return await all_or_first_error([generate_and_rm(args, one, sampling_params, evaluation) for one in group])


def _with_status(execution: Execution) -> list[Sample]:
    if execution.outcome is not Outcome.FINISHED:
        for sample in execution.samples:
            sample.status = _STATUS.get(execution.outcome, Status.FAILED)
            sample.failure = execution.reason if sample.status is Status.FAILED else ""
    return execution.samples


# `GenerateState`: what functions of the public slime ask for the tokenizer, the parameters and the end of a step.


class GenerateState:
    """One for each event loop on which executions run, whoever asks; made of the rollout that runs.

    Raises `HookError` outside a rollout.
    """

    args: Args
    tokenizer: Any
    """That of the policy."""
    processor: None = None
    """Of images; text alone is trained."""
    semaphore: asyncio.Semaphore
    """As many places as the engines have: for functions that ask by clients of their own."""
    sampling_params: dict[str, Any]
    """Those of training; a function gets a copy of its own."""

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
        """Whether the run ends what the calling execution has under way, which is not finished then."""
        scope, transcript = REQUEST_SCOPE.get(), TRANSCRIPT.get()
        ended = scope is not None and scope.aborted
        if ended and transcript is not None:
            transcript.taken_back = True
        return ended


# The public name of the schedule `fully_async`, as a rollout function.
#
#     --rollout-function-path slime.rollout.fully_async.generate_rollout_fully_async         # the same as --fully-async
#
# The settings read the name alone. The worker (`schedules.fully_async`) lives for the whole run, so that no call of one
# step could be it; evaluation is the same with every schedule, and may be called.


def generate_rollout_fully_async(args: Args, rollout_id: int, data_source: Any, evaluation: bool = False) -> Output:
    """Evaluates as `loop.generate_rollout`. Raises `HookError` for a step of training."""
    if evaluation:
        return generate_rollout(args, rollout_id, data_source, evaluation=True)
    raise HookError(
        f"got a call of generate_rollout_fully_async for step {rollout_id}, because your own function wraps it and "
        "its worker outlives a step; give --fully-async alone, or derive a schedule from "
        "slime.rollout.schedules.fully_async.FullyAsync and name it with --rollout-schedule"
    )


# Grading by functions of the user's: the built-in graders, by the names of `--rm-type`.
#
# In the rollout the pool of graders is asked. In a grader's own process, where reward functions run, the grader is
# called at once: that process can be killed already.

LIMIT_S = 30.0
"""Of a grader that is called here."""


async def async_rm(args: Args, sample: Sample, **kwargs: Any) -> Reward:
    """The reward of one sample, by its metadata's `rm_type` or that of the settings. Raises `DataError` without one."""
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
    """The rewards of several. Raises as `async_rm`."""
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
