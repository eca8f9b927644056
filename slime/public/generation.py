"""Generation API of the public slime for plugins: generating and grading samples and groups, `GenerateState`, built-in
graders, and the entry point of the fully asynchronous rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Self

from slime.core.errors import DataError, HookError
from slime.core.sample import Sample, Status
from slime.rewards.graders import GRADERS, Reward, make_grader
from slime.rewards.scores import Unscored
from slime.rollout.client.engine_client import REQUEST_SCOPE
from slime.rollout.context import current, on_rollout_loop
from slime.rollout.execute import Execution, Outcome, all_or_first_error, run_execution
from slime.rollout.factories import processor_of
from slime.rollout.generate import rollout_sampling_params
from slime.rollout.guard import waiting
from slime.rollout.loop import Output, generate_rollout
from slime.rollout.traces import traced
from slime.rollout.transcript import TRANSCRIPT
from slime.rollout.types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.user_functions import RolloutHooks
from slime.settings import Args, for_hook

logger = logging.getLogger(__name__)


@on_rollout_loop
async def generate_and_rm(
    args: Args, sample: Sample | list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Generates and grades a sample. Returns the graded sample, or a list of fan-out siblings.

    An unfinished sample has status ABORTED or FAILED and no reward. A sample that cannot be graded, or whose tokens are
    not as sampled, has no reward either, and `unscored` says why; a step may return it, but does not train on it.
    """
    context, siblings = current(), [sample] if isinstance(sample, Sample) else list(sample)
    hook = RolloutHooks.load(args).generate
    execution = await run_execution(context, siblings, sampling_params, hook, evaluation=evaluation)
    samples = _with_status(execution)
    return samples[0] if len(samples) == 1 else samples


@on_rollout_loop
async def generate_and_rm_group(
    args: Args, group: Sequence[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample | list[Sample]]:
    """Calls `generate_and_rm` concurrently for all executions of a group."""
    return await all_or_first_error([generate_and_rm(args, one, sampling_params, evaluation) for one in group])


def _with_status(execution: Execution) -> list[Sample]:
    if execution.outcome is Outcome.UNSCORED:
        for sample in execution.samples:  # complete, but without a reward, and so not trained on
            sample.unscored = sample.unscored or execution.reason
    elif execution.outcome is not Outcome.FINISHED:
        for sample in execution.samples:
            sample.status = Status.ABORTED if execution.outcome is Outcome.ABORTED else Status.FAILED
            sample.failure = execution.reason if sample.status is Status.FAILED else ""
    return execution.samples


class GenerateState:
    """Per-event-loop state for user functions: tokenizer, sampling parameters, semaphore, and whether to stop early.

    Creating it outside a rollout raises `HookError`.
    """

    args: Args
    tokenizer: Any
    semaphore: asyncio.Semaphore
    """Limits concurrent requests to the engines' total concurrency, for functions that use their own client."""
    _run_args: Args
    sampling_params: dict[str, Any]
    """Sampling parameters for training rollouts. Each function gets a copy."""

    _of_loops: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, GenerateState]] = (
        weakref.WeakKeyDictionary()
    )

    def __new__(cls, args: Args) -> Self:
        context, params = current(), rollout_sampling_params(args)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = context.loop
        known = cls._of_loops.get(loop)
        if not isinstance(known, cls) or known._run_args is not context.args:
            known = super().__new__(cls)
            known._run_args, known.args, known.tokenizer = context.args, for_hook(context.args), context.tokenizer
            known.sampling_params = rollout_sampling_params(context.args)
            if context.loopback is not None:
                with context.loopback.addressed(known.args, shared=True):
                    pass  # the addresses stay valid
            num_engines = len(context.client.engines()) if context.client is not None else 0
            known.semaphore = asyncio.Semaphore(context.args.sglang_server_concurrency * max(1, num_engines))
            cls._of_loops[loop] = known
        if params == known.sampling_params:
            return known
        changed = super().__new__(cls)  # the function changed them, but only for itself
        changed.__dict__.update(known.__dict__)
        changed.args, changed.sampling_params = args, params
        return changed

    @functools.cached_property
    def processor(self) -> Any:
        """The checkpoint's processor for text and images. None unless the data has images (`--multimodal-keys`)."""
        has_images = self._run_args.multimodal_keys is not None
        return processor_of(self._run_args.hf_checkpoint) if has_images else None

    @property
    def aborted(self) -> bool:
        """Whether the run is aborting the calling execution."""
        scope, transcript = REQUEST_SCOPE.get(), TRANSCRIPT.get()
        ended = scope is not None and scope.aborted
        if ended and transcript is not None:
            transcript.taken_back = True
        return ended


def generate_rollout_fully_async(args: Args, rollout_id: int, data_source: Any, evaluation: bool = False) -> Output:
    """Selects `--fully-async` when passed to `--rollout-function-path`, as in the public slime.

    Runs evaluations like `loop.generate_rollout`. Raises `HookError` for a training step, because the worker
    (`schedules.fully_async`) lives for the whole run.
    """
    if evaluation:
        return generate_rollout(args, rollout_id, data_source, evaluation=True)
    raise HookError(
        f"your function called generate_rollout_fully_async for step {rollout_id}, but fully asynchronous rollout does "
        "not run step by step; use --fully-async without this function, or subclass "
        "slime.rollout.schedules.fully_async.FullyAsync and pass the class to --rollout-schedule"
    )


async def sleep(args: Args, rollout_id: int, data_source: Any, evaluation: bool = False) -> Output:
    """Never returns, so that the engines stay up for a profiler or manual requests. Stop the run to end it."""
    logger.warning("step %d generates nothing and waits until the run is stopped (sleep_rollout)", rollout_id)
    with waiting():
        await asyncio.Event().wait()
    raise AssertionError("unreachable: nothing sets the event")


LIMIT_S = 30.0
"""Time limit for a grader called in this process."""


@on_rollout_loop
async def async_rm(args: Args, sample: Sample, **kwargs: Any) -> Reward:
    """Grades a sample with the built-in grader selected by `rm_type` in its metadata or by --rm-type.

    Uses the grader pool during a rollout. In a grader process, which runs reward functions and can be killed, calls the
    grader directly. Raises `DataError` if no grader is selected.
    """
    try:
        pool = current().graders
    except HookError:
        return await _graded_here(args, sample)
    if pool is None:
        raise DataError("no grader is configured for this sample; set --rm-type")
    score = await pool.score(sample)
    if isinstance(score, Unscored):
        raise DataError(f"sample {sample.index} has no reward: {score.reason}")
    sample.ungradable = score.ungradable
    return score.value


@on_rollout_loop
async def batched_async_rm(args: Args, samples: Sequence[Sample], **kwargs: Any) -> list[Reward]:
    return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))


async def _graded_here(args: Args, sample: Sample) -> Reward:
    rm_type = sample.metadata.get("rm_type") or args.rm_type
    if not rm_type:
        raise DataError("no grader is configured for this sample; set --rm-type, or rm_type in the sample's metadata")
    kind: Any = GRADERS.get(rm_type)
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    settings = {field.name: getattr(args, field.name) for field in fields if hasattr(args, field.name)}
    result = make_grader(rm_type, settings).grade(sample, LIMIT_S)
    return await result if inspect.isawaitable(result) else result


def call_rollout_fn(fn: Callable[..., Any], *given: Any, evaluation: bool, **named: Any) -> Any:
    """Calls a synchronous rollout or evaluation function. Wraps a list or dict that it returns."""
    output = fn(*given, **named, evaluation=evaluation)
    if evaluation:
        return RolloutFnEvalOutput(output) if isinstance(output, dict) else output
    return RolloutFnTrainOutput(output) if isinstance(output, list) else output


@contextlib.contextmanager
def trace_span(*given: Any, **facts: Any) -> Iterator[None]:
    """Records the block as a span in the trace of the running execution. Its name is the last text among the arguments;
    `attrs`, a dict, holds facts about it.
    """
    name = next((one for one in reversed(given) if isinstance(one, str)), "span")
    own = facts.pop("attrs", None) or {}
    with traced(name, **{str(key): str(value) for key, value in {**facts, **own}.items()}):
        yield
