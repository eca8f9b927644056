"""Multi-turn tool use: what the model writes is code for a Python process, whose output is masked context."""

from __future__ import annotations

import asyncio
import sys

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

MAX_TURNS = 3
LIMITS = asyncio.Semaphore(8)


async def run_python(code):
    """Of a sandbox: nothing but the standard library, and two seconds."""
    async with LIMITS:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-c", code),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={},
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), timeout=20)
        except TimeoutError:
            process.kill()
            return "timeout"
    return output.decode(errors="replace").strip().splitlines()[-1][:12] if output else "nothing"


async def generate(args, sample, sampling_params):
    assert not args.partial_rollout, "partial rollout is not supported"
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response, response_ids, loss_mask = "", [], []
    sample.rollout_log_probs = []
    for turn in range(MAX_TURNS):
        output = await post(
            url, {"input_ids": prompt_ids + response_ids, "sampling_params": sampling_params, "return_logprob": True}
        )
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        pairs = output["meta_info"]["output_token_logprobs"]
        response_ids += [pair[1] for pair in pairs]
        sample.rollout_log_probs += [pair[0] for pair in pairs]
        loss_mask += [1] * len(pairs)
        response += output["text"]
        if output["meta_info"]["finish_reason"]["type"] == "length" and turn + 1 == MAX_TURNS:
            break
        observation = "\n>" + await run_python(f"print({len(output['text'])} * 2)") + "\n"
        observation_ids = state.tokenizer(observation, add_special_tokens=False)["input_ids"]
        response_ids += observation_ids
        sample.rollout_log_probs += [0.0] * len(observation_ids)
        loss_mask += [0] * len(observation_ids)
        response += observation
        sample.tool_call_count = getattr(sample, "tool_call_count", 0) + 1
    sample.tokens = prompt_ids + response_ids
    sample.response_length, sample.response, sample.loss_mask = len(response_ids), response, loss_mask
    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample


async def reward_func(args, sample, **kwargs):
    digits = sum(character.isdigit() for character in sample.response)
    return {"score": digits / max(1, len(sample.response)) + 0.01 * sample.tool_call_count, "pred": ""}
