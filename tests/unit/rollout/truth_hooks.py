"""Functions of a user's that get tokens into samples, rightly or not, for `test_transcript`.

Who writes a token that nobody sampled says so in `metadata["untrue"]`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any

from slime.core.sample import Sample, Status
from slime.rollout.client.call import Generation, Pictures
from slime.rollout.context import current
from slime.rollout.generate import generate

TRIES: Counter[int | None] = Counter()
TRAINED: list[Sample] = []


def noted(args: Any, groups: list[list[Sample]]) -> None:
    TRAINED.extend(sample for group in groups for sample in group)


def spoil(sample: Sample) -> None:
    """Another last token than the one that was sampled."""
    sample.tokens = [*sample.tokens[:-1], sample.tokens[-1] ^ 1]
    sample.metadata["untrue"] = True


async def odd_ones_are_untrue(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
    await generate(args, sample, params)
    if (sample.index or 0) % 2:
        spoil(sample)
    return sample


async def always_untrue(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
    await generate(args, sample, params)
    spoil(sample)
    return sample


async def one_of_the_first_group_is_true(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
    await generate(args, sample, params)
    if sample.group_index == 0 and sample.index:
        spoil(sample)
    return sample


async def untrue_beside_a_failure(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
    """Of four executions the first is never true, and the second fails once."""
    TRIES[sample.index] += 1
    if (sample.index or 0) % 4 == 1 and TRIES[sample.index] == 1:
        raise ValueError("a tool failed")
    await generate(args, sample, params)
    if (sample.index or 0) % 4 == 0:
        spoil(sample)
    return sample


async def samples_a_placeholder_once(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
    """Its first conversation cannot continue."""
    TRIES[sample.index] += 1
    await generate(args, sample, params)
    if sample.index == 1 and TRIES[sample.index] == 1:
        Pictures(sample.tokens[-1], ()).written(sample.tokens)
    return sample


async def untrue_beside_a_long_one(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
    """Of four executions the first is untrue, and the second is still under way when the run pauses."""
    place = (sample.index or 0) % 4
    await generate(args, sample, {**params, "max_new_tokens": 100 if place == 1 else 4})
    if place == 0:
        spoil(sample)
    return sample


def one_reward_each(args: Any, samples: list[Sample], **_: Any) -> list[float]:
    return [float(i) for i, _ in enumerate(samples)]


def spoiling_filter(args: Any, samples: list[Sample], **_: Any) -> bool:
    spoil(samples[0])
    return True


def spoiling_sample_filter(args: Any, groups: list[list[Sample]]) -> None:
    for group in groups:
        spoil(group[0])


def masking_sample_filter(args: Any, groups: list[list[Sample]]) -> None:
    for group in groups:
        group[0].loss_mask = [0] * group[0].response_length
        group[1].remove_sample = True


async def a_new_sample(args: Any, sample: Sample) -> Sample:
    """Sample hook: only what a person would copy."""
    names = ("prompt", "tokens", "response", "response_length", "label", "status")
    return Sample(**{name: getattr(sample, name) for name in names})


async def trains_the_end(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
    """What it does not train is prompt now."""
    await generate(args, sample, params)
    before, sample.response_length = sample.response_length - 3, 3
    for name in ("loss_mask", "rollout_log_probs", "token_versions"):
        setattr(sample, name, getattr(sample, name)[before:])
    return sample


def _appended(sample: Sample, ids: list[int], answer: Generation) -> Sample:
    sample.tokens = ids
    versions, reason = answer.weight_version, answer.finish_reason
    sample.append_response_tokens(
        answer.tokens, log_probs=answer.log_probs, weight_version=versions, finish_reason=reason
    )
    return sample


async def in_a_thread(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
    """Asks from a thread of its own, which knows of no execution."""
    engine, loop, ids = current().engine(), current().loop, current().tokenizer.encode(sample.prompt)
    found: list[Generation] = []

    def work() -> None:
        found.append(asyncio.run_coroutine_threadsafe(engine.generate(ids, params), loop).result())

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        await asyncio.sleep(0.005)
    return _appended(sample, ids, found[0])


SHARED: list[tuple[Any, Any]] = []
"""The queue of a task that the first execution starts, and all others use."""


async def asked_by_a_shared_task(ids: list[int], params: dict[str, Any]) -> Generation:
    if not SHARED:
        engine, queue = current().engine(), asyncio.Queue[Any]()

        async def one(ids: list[int], params: dict[str, Any], answer: asyncio.Future[Generation]) -> None:
            try:
                answer.set_result(await engine.generate(ids, params))
            except Exception as problem:
                answer.set_exception(problem)

        async def serve() -> None:
            tasks = set()
            while True:
                task = asyncio.create_task(one(*await queue.get()))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

        SHARED.append((queue, asyncio.create_task(serve())))
    answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
    await SHARED[0][0].put((ids, params, answer))
    return await answer


async def by_a_shared_task(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
    ids = current().tokenizer.encode(sample.prompt)
    return _appended(sample, ids, await asked_by_a_shared_task(ids, params))


async def judged_by_a_shared_task(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
    await generate(args, sample, params)
    if sample.status is not Status.ABORTED:
        answer = await asked_by_a_shared_task(list(sample.tokens), {**params, "max_new_tokens": 40})
        sample.reward, sample.metadata["whole"] = 1.0, len(answer.tokens) == 40
    return sample


async def learns_by_heart(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
    """No engine is asked."""
    sample.tokens = current().tokenizer.encode(sample.prompt)
    sample.append_response_tokens(current().tokenizer.encode(sample.label))
    sample.loss_mask, sample.status = [1] * sample.response_length, Status.COMPLETED
    return sample


PROMPTS: list[Any] = []


async def own_prompt(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
    """Returns a new sample with a prompt of its own; the first try of each execution is untrue."""
    PROMPTS.append((sample.prompt, sample.tokens, sample.metadata.get("seen")))
    TRIES[sample.index] += 1
    made = Sample(prompt="of my own", tokens=current().tokenizer.encode(f"{sample.prompt}?"), metadata={"seen": 1})
    await generate(args, made, params)
    if TRIES[sample.index] == 1:
        spoil(made)
    return made


def from_texts(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """A rollout function whose first sample of every group, or every sample, is a text that no engine sampled."""
    groups = data_source.get_samples(args.rollout_batch_size)
    for sample in (one for group in groups for one in group):
        sample.tokens, sample.status = [5, 6, 7, 8], Status.COMPLETED
        sample.response_length, sample.reward, sample.loss_mask = 2, float(sample.index % 2), [1, 1]
        if sample.index % 2 and not getattr(args, "of_texts_alone", False):
            sample.rollout_log_probs = [-0.5, 0.0]  # as an engine of the function's own reported them
    return groups


def all_from_texts(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    args.of_texts_alone = True
    return from_texts(args, rollout_id, data_source)


def converted(args: Any, samples: list[Sample]) -> dict[str, Any]:
    """The first sample's tokens are others than those that were sampled."""
    columns = {
        "tokens": [list(s.tokens) for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "rewards": [float(s.index % 2) for s in samples],
    }
    columns["tokens"][0][-1] ^= 1
    return columns


async def asks_wrongly(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
    """With a client of its own, which drops the text of an error."""
    import aiohttp

    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json={"input_ids": [5], "sampling_params": params, "top_logprobs_num": 5}) as answer,
    ):
        answer.raise_for_status()
    return sample
