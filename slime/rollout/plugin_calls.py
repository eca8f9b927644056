"""An execution, or a group, for rollout functions of the user's that make their own loop: sampled and graded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime.core.sample import Sample, Status
from slime.rollout.context import current
from slime.rollout.execute import Execution, Outcome, all_or_first_error, run_execution
from slime.rollout.user_functions import RolloutHooks
from slime.settings import Args

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
