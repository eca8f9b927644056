"""A reward from a judge: the policy's own engines, asked over HTTP, as a judge behind the run's router is asked."""

from __future__ import annotations

import aiohttp


async def reward_func(args, sample, **kwargs):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    question = {"text": f"{sample.response} is", "sampling_params": {"max_new_tokens": 4, "temperature": 0.0}}
    async with aiohttp.ClientSession() as session, session.post(url, json=question) as answer:
        answer.raise_for_status()
        verdict = (await answer.json())["text"]
    return sum(character.isdigit() for character in sample.response + verdict) / 16
