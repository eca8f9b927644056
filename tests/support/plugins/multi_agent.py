"""Agents in turns: two solvers, a rewriter of each, a selector. Settings travel on `args`; each turn is a sample."""

from __future__ import annotations

import asyncio
import random
from copy import deepcopy

from slime.rollout.rm_hub import batched_async_rm
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

NUM_PARALLEL = 2


async def ask(args, prompt, key):
    """One answer, kept as a sample of its own under `key`."""
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    params = deepcopy(args.sampling_params)
    prompt_ids = args.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    most = args.rollout_max_context_len - len(prompt_ids)
    params["max_new_tokens"] = min(params["max_new_tokens"], most)
    if params["max_new_tokens"] <= 0:
        return None
    output = await post(url, {"input_ids": prompt_ids, "sampling_params": params, "return_logprob": True})
    sample = deepcopy(args.base_sample)
    pairs = output["meta_info"]["output_token_logprobs"]
    sample.tokens = prompt_ids + [pair[1] for pair in pairs]
    sample.rollout_log_probs = [pair[0] for pair in pairs]
    sample.response, sample.response_length = output["text"], len(pairs)
    sample.prompt = prompt
    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "abort":
            sample.status = Sample.Status.ABORTED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    args.results_dict[key].append(sample)
    return output["text"]


async def generate(args, sample, sampling_params):
    args.sampling_params = sampling_params
    args.rollout_max_context_len = args.rollout_max_context_len or 200
    args.tokenizer = GenerateState(args).tokenizer
    args.base_sample = sample
    args.results_dict = {"solver": [], "rewriter": [], "selector": []}
    solved = await asyncio.gather(*(ask(args, sample.prompt, "solver") for _ in range(NUM_PARALLEL)))
    rewards = await batched_async_rm(args, args.results_dict["solver"])
    for one, reward in zip(args.results_dict["solver"], rewards, strict=True):
        one.reward = reward
    tasks = [ask(args, f"{sample.prompt}rewrite: {text}", "rewriter") for text in solved if text is not None]
    rewritten = [text for text in await asyncio.gather(*tasks) if text is not None]
    random.Random(sample.index).shuffle(rewritten)
    await ask(args, f"{sample.prompt}select: {' | '.join(rewritten)}", "selector")
    others = args.results_dict["rewriter"] + args.results_dict["selector"]
    for one, reward in zip(others, await batched_async_rm(args, others), strict=True):
        one.reward = reward
    return args.results_dict["solver"] + others
