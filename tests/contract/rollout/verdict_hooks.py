"""Functions of a user's that take an answer for whole, each in another place, for `test_taken_back`.

Each notes whether the verdict has as many tokens as it asked for, so that one that was cut short is seen. The groups of
every second prompt take longer, so that a step ends while they are being judged.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import aiohttp

from slime.core.sample import Sample, Status
from slime.rollout.context import current
from slime.rollout.generate import generate
from slime.utils.http_utils import post

ASKED = {"temperature": 1.0, "max_new_tokens": 32, "ignore_eos": True}


TRAINED: list[Sample] = []
"""What batches held."""


def noted(args: Any, groups: list[list[Sample]]) -> None:
    """Sample filter."""
    TRAINED.extend(sample for group in groups for sample in group)


def asked_of(sample: Sample) -> dict[str, Any]:
    """What a verdict over it is asked with."""
    return {**ASKED, "max_new_tokens": 96 if (sample.group_index or 0) % 2 else 32}


async def verdict(sample: Sample, **given: Any) -> None:
    """A judge's answer is the reward, however long it is."""
    asked = asked_of(sample)
    answer = await current().engine().generate(sample.tokens, asked, **given)
    sample.metadata["whole"] = len(answer.tokens) == asked["max_new_tokens"]
    sample.reward = float(len(answer.tokens))


async def judged(args: Any, sample: Sample, evaluation: bool = False) -> None:
    """Sample hook: lets the error out, as the documentation says."""
    await verdict(sample)


async def judged_in_part(args: Any, sample: Sample, evaluation: bool = False) -> None:
    """Sample hook: asks for parts, and takes one for a verdict."""
    await verdict(sample, returns_partial=True)


async def judged_whatever_happens(args: Any, sample: Sample, evaluation: bool = False) -> None:
    """Sample hook: no error is one."""
    sample.reward, sample.metadata["whole"] = 0.0, False
    with contextlib.suppress(Exception):
        await verdict(sample)


async def asks_again(args: Any, sample: Sample, evaluation: bool = False) -> None:
    """Sample hook: asks until it has an answer, however often it was told to stop."""
    for _ in range(3):
        await judged_whatever_happens(args, sample)
        if sample.metadata["whole"]:
            return


async def searches(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generate function: three answers behind each other, and COMPLETED whatever became of them."""
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.tokens = sample.tokens or current().tokenizer.encode(sample.prompt)
    sample.response_length, sample.tokens = 0, sample.tokens[: sample.prompt_length]
    sample.loss_mask, sample.rollout_log_probs = [], []
    params = {**ASKED, "max_new_tokens": 12 + 20 * ((sample.group_index or 0) % 2)}
    for _ in range(3):
        payload = {"input_ids": sample.tokens, "sampling_params": params}
        pairs = (await post(url, {**payload, "return_logprob": True}))["meta_info"]["output_token_logprobs"]
        sample.tokens = [*sample.tokens, *(one[1] for one in pairs), 40]
        sample.loss_mask += [1] * len(pairs) + [0]
        sample.rollout_log_probs += [one[0] for one in pairs] + [0.0]
        sample.response_length += len(pairs) + 1
    sample.metadata["whole"] = sum(sample.loss_mask) == 3 * params["max_new_tokens"]
    sample.status = Status.COMPLETED
    return sample


def filtered(args: Any, samples: list[Sample]) -> bool:
    """Dynamic filter: a judge looks at the whole group."""

    async def ask() -> None:
        await verdict(samples[0], returns_partial=True)

    asyncio.run_coroutine_threadsafe(ask(), current().loop).result()
    for sample in samples[1:]:
        sample.metadata["whole"] = samples[0].metadata["whole"]
    return True


async def over_http(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generate function: the policy by the client, a judge by an HTTP client of its own."""
    await generate(args, sample, {**sampling_params, "max_new_tokens": 4})
    sample.reward = await graded_over_http(args, sample)
    sample.metadata["whole"] = sample.reward == asked_of(sample)["max_new_tokens"]
    return sample


async def graded_over_http(args: Any, sample: Sample) -> float:
    """Reward function, in a process of graders: the length of a judge's answer."""
    asked = {"text": "1+1=", "sampling_params": asked_of(sample)}
    async with (
        aiohttp.ClientSession(raise_for_status=True) as session,
        session.post(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate", json=asked) as answer,
    ):
        return float((await answer.json())["meta_info"]["completion_tokens"])
