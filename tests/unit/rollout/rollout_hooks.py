"""User functions of the loop tests, named by path."""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter
from typing import Any

from slime.core.sample import Sample, Status
from slime.rewards.graders import Grader
from slime.rollout.context import current
from slime.rollout.generate import generate
from slime.rollout.schedules import RolloutSchedule
from slime.rollout.types import RolloutFnTrainOutput

TRIES: Counter[int | None] = Counter()
"""How often each execution was tried."""


def reward(args: Any, sample: Sample) -> float:
    """Differs between the executions of a prompt."""
    return float((sample.index or 0) % 2)


def one_unscored(args: Any, sample: Sample) -> float | None:
    """No score for the first of four executions."""
    return float((sample.index or 0) % 2) if (sample.index or 0) % 4 else None


def keep_some_right(args: Any, samples: list[Sample]) -> bool:
    """As written for rewards that are numbers."""
    rewards = [sample.get_reward_value(args) for sample in samples]
    return len(rewards) == 3 and max(rewards) > 0.5  # type: ignore[type-var, operator]


def nan_reward(args: Any, sample: Sample) -> float:
    return float("nan")


def group_reward(args: Any, samples: list[Sample]) -> list[float]:
    return [float(len(samples))] * len(samples)


async def flaky(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Raises on the first try of every third execution, then generates."""
    TRIES[sample.index] += 1
    if (sample.index or 0) % 3 == 0 and TRIES[sample.index] == 1:
        raise ConnectionError("as told")
    return await generate(args, sample, sampling_params)


async def broken(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    raise ConnectionError("the sandbox is down")


async def forgetful(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generates and does not say how it ended."""
    await generate(args, sample, sampling_params)
    sample.status = Status.PENDING
    return sample


async def interrupted(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Never gets to the end."""
    sample.status = Status.ABORTED
    return sample


async def wrong(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Any:
    return "text"


async def fan_out(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Two samples per execution."""
    other = copy.deepcopy(sample)
    return list(await asyncio.gather(*(generate(args, s, sampling_params) for s in (sample, other))))


async def slow_failure(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The first group fails in every try, each of which takes longer than a step."""
    if sample.group_index == 0:
        await asyncio.sleep(0.3)
        raise RuntimeError("a tool is broken")
    return await generate(args, sample, sampling_params)


def drop_odd(args: Any, samples: list[Sample]) -> bool:
    return (samples[0].group_index or 0) % 2 == 0


SLOW_CALLS: list[tuple[float, float]] = []
"""When calls of `slow_filter` began and ended."""


def slow_filter(args: Any, samples: list[Sample]) -> bool:
    began = time.monotonic()
    time.sleep(0.3)
    SLOW_CALLS.append((began, time.monotonic()))
    return True


def leaking_filter(args: Any, samples: list[Sample]) -> bool:
    return next(s for s in samples if s.group_index is None) is None


def drop_all(args: Any, samples: list[Sample]) -> bool:
    return False


def own_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """A synchronous user rollout on the public contract: takes three groups, keeps two, loses one."""
    groups = data_source.get_samples(3)

    async def run() -> None:
        for group in groups[:2]:
            for sample in group:
                await generate(args, sample, {"temperature": 1.0, "max_new_tokens": 4})
                sample.reward = 1.0

    async def in_context() -> None:
        await run()

    asyncio.run_coroutine_threadsafe(in_context(), current().loop).result()
    return RolloutFnTrainOutput(groups[:2], {"rollout/own": 1.0})


def halve(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
    raw = [float(s.get_reward_value() or 0.0) for s in samples]
    return raw, [r / 2 for r in raw]


class NoSchedule(RolloutSchedule):
    """It has no step."""


class NoGrader(Grader):
    """It does not grade."""
