"""Grading by functions of the user's: the built-in graders, by the names of `--rm-type`.

In the rollout the pool of graders is asked. In a grader's own process, where reward functions run, the grader is called
at once: that process can be killed already.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

from slime.core.errors import DataError, HookError
from slime.core.sample import Sample
from slime.rewards.graders import GRADERS, Reward, make_grader
from slime.rewards.scores import Unscored
from slime.rollout.context import current
from slime.settings import Args

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
