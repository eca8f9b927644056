"""Generation for plugins of the public slime: sampled and graded executions and groups, `GenerateState`, grading by
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


async def generate_and_rm(
    args: Args, sample: Sample | list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Generates and grades a sample. Returns it with its reward, or the siblings of a fan-out.

    An unfinished sample has the status ABORTED or FAILED and no reward.
    """
    context, siblings = current(), [sample] if isinstance(sample, Sample) else list(sample)
    hook = RolloutHooks.load(args).generate
    execution = await run_execution(context, siblings, sampling_params, hook, evaluation=evaluation)
    samples = _with_status(execution)
    return samples[0] if len(samples) == 1 else samples


async def generate_and_rm_group(
    args: Args, group: Sequence[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample | list[Sample]]:
    """Calls `generate_and_rm` for all executions of a group, in parallel."""
    return await all_or_first_error([generate_and_rm(args, one, sampling_params, evaluation) for one in group])


def _with_status(execution: Execution) -> list[Sample]:
    if execution.outcome is not Outcome.FINISHED:
        for sample in execution.samples:
            sample.status = Status.ABORTED if execution.outcome is Outcome.ABORTED else Status.FAILED
            sample.failure = execution.reason if sample.status is Status.FAILED else ""
    return execution.samples


class GenerateState:
    """Tokenizer, sampling parameters and the end of a step, for users' functions. Each event loop has one.

    Raises `HookError` outside a rollout.
    """

    args: Args
    tokenizer: Any
    processor: None = None
    """Always None: there is no image processor."""
    semaphore: asyncio.Semaphore
    """A semaphore with one permit per slot of the engines, for functions with their own clients."""
    sampling_params: dict[str, Any]
    """Sampling parameters of training; each function gets a copy."""

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
        """Whether the run stops the calling execution early and leaves it unfinished."""
        scope, transcript = REQUEST_SCOPE.get(), TRANSCRIPT.get()
        ended = scope is not None and scope.aborted
        if ended and transcript is not None:
            transcript.taken_back = True
        return ended


def generate_rollout_fully_async(args: Args, rollout_id: int, data_source: Any, evaluation: bool = False) -> Output:
    """Stands for `--fully-async`: the public slime names this function in `--rollout-function-path`. Only the settings
    use the name, because the worker (`schedules.fully_async`) lives for the whole run.

    An evaluation runs as in `loop.generate_rollout`. Raises `HookError` for a training step.
    """
    if evaluation:
        return generate_rollout(args, rollout_id, data_source, evaluation=True)
    raise HookError(
        f"your function called generate_rollout_fully_async for step {rollout_id}, but its worker outlives a step; set "
        "--fully-async without this function, or derive a schedule from "
        "slime.rollout.schedules.fully_async.FullyAsync and name it with --rollout-schedule"
    )


LIMIT_S = 30.0
"""Time limit of a grader that is called in this process."""


async def async_rm(args: Args, sample: Sample, **kwargs: Any) -> Reward:
    """Returns the reward of a sample from the built-in grader that its metadata's `rm_type` or --rm-type names.

    In a rollout, the pool of graders computes it. In a grader's process, which runs reward functions and can be killed,
    the grader is called directly. Raises `DataError` without a grader.
    """
    try:
        pool = current().graders
    except HookError:
        return await _graded_here(args, sample)
    if pool is None:
        raise DataError("the run has no grader for this sample; set --rm-type")
    score = await pool.score(sample)
    if isinstance(score, Unscored):
        raise DataError(f"sample {sample.index} has no reward: {score.reason}")
    sample.ungradable = score.ungradable
    return score.value


async def batched_async_rm(args: Args, samples: Sequence[Sample], **kwargs: Any) -> list[Reward]:
    return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))


async def _graded_here(args: Args, sample: Sample) -> Reward:
    rm_type = sample.metadata.get("rm_type") or args.rm_type
    if not rm_type:
        raise DataError("the sample has no grader; set --rm-type, or rm_type in the sample's metadata")
    kind: Any = GRADERS.get(rm_type)
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    settings = {field.name: getattr(args, field.name) for field in fields if hasattr(args, field.name)}
    result = make_grader(rm_type, settings).grade(sample, LIMIT_S)
    return await result if inspect.isawaitable(result) else result
