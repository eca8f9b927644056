"""User functions that stand still, and that raise what ends processes. Named by path; a test lets go of them."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from slime.core.sample import Sample, Status
from slime.rollout.context import current
from slime.rollout.generate import generate
from slime.rollout.guard import alive
from slime.rollout.loop import generate_rollout

LET_GO = threading.Event()
"""Ends the functions that stand still in threads."""
TRIES: Counter[int | None] = Counter()
"""How often each execution was tried."""
RAISES: list[Callable[[], BaseException]] = [SystemExit]
"""What the first try of the first execution raises."""


class Stop(BaseException):
    """Of a user's own."""


def is_first_try(sample: Sample) -> bool:
    TRIES[sample.index] += 1
    return sample.index == 0 and TRIES[sample.index] == 1


async def never(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One execution waits for what never comes."""
    if sample.index == 0:
        await asyncio.get_running_loop().create_future()
    return await generate(args, sample, sampling_params)


async def never_in_thread(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    if sample.index == 0:
        await asyncio.to_thread(LET_GO.wait)
    return await generate(args, sample, sampling_params)


async def exits(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    if is_first_try(sample):
        raise RAISES[0]()
    return await generate(args, sample, sampling_params)


async def exits_in_task(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """As many libraries do: part of the work is a task of its own."""
    await asyncio.gather(asyncio.create_task(exits(args, sample, sampling_params)), asyncio.sleep(0))
    return sample


async def exits_in_thread(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    def work() -> None:
        if is_first_try(sample):
            raise RAISES[0]()

    await asyncio.to_thread(work)
    return await generate(args, sample, sampling_params)


async def exits_in_forgotten_task(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Nobody waits for the task that raises."""
    task = asyncio.create_task(exits(args, sample.copy(), sampling_params))
    await asyncio.sleep(0)
    result = await generate(args, sample, sampling_params)
    await asyncio.wait([task])
    return result


def exiting_sample_hook(args: Any, sample: Sample) -> None:
    if is_first_try(sample):
        raise RAISES[0]()


def stuck_filter(args: Any, samples: list[Sample]) -> bool:
    LET_GO.wait()
    return True


def stuck_converter(args: Any, samples: list[Sample]) -> Any:
    LET_GO.wait()


async def long_episode(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Six hours: turns of five minutes, each with a tool and some tokens; half of an hour is a tool that says so."""
    for turn in range(66):
        await asyncio.sleep(300)
        part = await current().engine().generate(sample.tokens, {"max_new_tokens": 1})
        if part.finish_reason == "abort":
            sample.status = Status.ABORTED
            return sample
        sample.metadata["turns"] = turn + 1
    for _ in range(60):
        await asyncio.sleep(60)
        alive()
    return await generate(args, sample, sampling_params)


async def silent_hour(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One tool of one execution, of which nobody hears."""
    if sample.index == 0:
        await asyncio.sleep(3600)
    return await generate(args, sample, sampling_params)


def rewarded(args: Any, sample: Sample) -> None:
    sample.reward = 1.0


def sleep_until(event: threading.Event) -> None:
    while not event.wait(0.01):
        pass


async def blocks(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One execution sleeps on the event loop, again and again, and lets no error stop it."""
    while sample.index == 0:
        try:
            sleep_until(LET_GO)
            return sample
        except Exception:
            continue
    return await generate(args, sample, sampling_params)


async def endless_step(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """A rollout function that never returns."""
    await asyncio.get_running_loop().create_future()


def endless_step_in_thread(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    LET_GO.wait()


def patient_step(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """A rollout function around the default one."""
    return generate_rollout(args, rollout_id, data_source, evaluation)


async def exiting_step(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    raise SystemExit(3)


class ExitingSource:
    """A data source that has had enough."""

    def __init__(self, args: Any) -> None:
        """Has nothing."""

    def __len__(self) -> int:
        return 9

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        raise SystemExit("no more data")

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Takes nothing."""

    def save(self, rollout_id: int) -> None:
        """Saves nothing."""

    def load(self, rollout_id: int | None = None) -> None:
        """Loads nothing."""
