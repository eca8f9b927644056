"""User functions for the contract tests of hooks: generation with one sample and with a nest of siblings."""

from __future__ import annotations

import asyncio
import copy
from typing import Any
from weakref import WeakKeyDictionary

from examples.multi_turn_tools import converse
from slime.agent.messages import Message
from slime.core.sample import Sample
from slime.rollout.generate import generate


def _score(sample: Sample) -> None:
    """Nothing solved in every third prompt, one of two elsewhere; no grader process is needed."""
    sample.reward = 0.0 if (sample.group_index or 0) % 3 == 0 else 1.5 * ((sample.index or 0) % 2)


async def bare_single(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One sample, unscored."""
    return await generate(args, sample, sampling_params)


async def bare_fan_out(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Any:
    """A nest of three samples, unscored."""
    others = [copy.deepcopy(sample) for _ in range(2)]
    first, second, third = [await generate(args, s, sampling_params) for s in (sample, *others)]
    return [[first], [second, third]]


async def single(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One sample with a reward."""
    await generate(args, sample, sampling_params)
    _score(sample)
    return sample


async def fan_out(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Any:
    """Three samples of different rewards, of which the mean is the execution's."""
    nest = await bare_fan_out(args, sample, sampling_params)
    for sibling in (nest[0][0], *nest[1]):
        _score(sibling)
    return nest


TOGETHER = 4
"""Groups of two executions that `together_...` lets finish at one moment; later ones take long."""
_barriers: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Barrier] = WeakKeyDictionary()


async def _together(execute: Any, args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Any:
    if (sample.group_index or 0) >= TOGETHER:
        return await execute(args, sample, {**sampling_params, "max_new_tokens": 600, "ignore_eos": True})
    result = await execute(args, sample, sampling_params)
    await _barriers.setdefault(asyncio.get_running_loop(), asyncio.Barrier(2 * TOGETHER)).wait()
    return result


async def together_single(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Any:
    """As `single`; which groups are finished when the batch is full is no matter of chance."""
    return await _together(single, args, sample, sampling_params)


async def together_fan_out(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Any:
    """As `fan_out`, in the same way."""
    return await _together(fan_out, args, sample, sampling_params)


async def conversation(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """An environment that answers every turn; the number of turns is limited."""

    def reply(before: str, text: str) -> tuple[Message, Message]:
        return Message("assistant", text), Message("tool", f"{len(text)} characters <eos>")

    sample = await converse(args, sample, sampling_params, reply)
    sample.reward = 0.0
    return sample


async def own_reward(args: Any, sample: Sample, rollout_id: int, evaluation: bool) -> None:
    """A sample hook that changes the sample."""
    assert sample.reward is None, "the hook comes before the reward"
    sample.reward = float(rollout_id + (sample.index or 0) % 2)


def another_sample(args: Any, sample: Sample) -> Sample:
    """A sample hook that gives another sample; its identity is restored."""
    other = copy.deepcopy(sample)
    other.index, other.metadata = None, {"reward_was": sample.reward}
    other.reward = 10.0 + float(sample.reward or 0.0)  # type: ignore[arg-type]
    return other


def drop_everything(args: Any, samples: list[Sample]) -> bool:
    return False
