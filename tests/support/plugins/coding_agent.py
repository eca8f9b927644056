"""A black-box agent: a program in a process of its own talks to an adapter, which keeps what the model sampled."""

from __future__ import annotations

import asyncio
import os
import sys
import uuid

from slime.agent.adapters import AnthropicAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample

PROGRAM = """
import json, os, sys, urllib.request
messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(2):
    body = {"model": "m", "max_tokens": 64, "messages": messages}
    headers = {"x-api-key": os.environ["ANTHROPIC_AUTH_TOKEN"], "content-type": "application/json"}
    url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    answer = json.load(urllib.request.urlopen(request, timeout=300))
    messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "go on"}]
print(sum(map(len, (part.get("text", "") for part in answer["content"]))))
"""


class Adapter(metaclass=SingletonMeta):
    """One for the process."""

    def __init__(self, args):
        self.adapter = AnthropicAdapter(
            tokenizer=GenerateState(args).tokenizer,
            sglang_url=f"http://{args.sglang_router_ip}:{args.sglang_router_port}",
            tool_parser=None,
            reasoning_parser=None,
            max_turns_per_sid=8,
        )
        self.served = run_app_in_thread(self.adapter.app, os.environ.get("ADAPTER_BIND_HOST", "127.0.0.1"), 0)


async def generate(args, sample, sampling_params, evaluation=False):
    one, sid = Adapter(args), f"sid-{uuid.uuid4().hex}"
    one.adapter.open_session(sid, sampling_params, max_context_tokens=args.rollout_max_context_len)
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-c", PROGRAM, str(sample.prompt)),
            stdout=asyncio.subprocess.PIPE,
            env={"ANTHROPIC_BASE_URL": one.served.url, "ANTHROPIC_AUTH_TOKEN": sid},
        )
        output, _ = await asyncio.wait_for(process.communicate(), timeout=300)
        await one.adapter.shutdown_session(sid)
    except BaseException:
        one.adapter.drop_session(sid)
        raise
    solved = process.returncode == 0 and bool(output)
    samples = one.adapter.finish_session(sid, sample, reward=None, extra_metadata={"solved": solved})
    if not samples:
        sample.tokens, sample.response_length, sample.remove_sample = [0, 0], 1, True
        sample.loss_mask, sample.rollout_log_probs, sample.status = [0], [0.0], Sample.Status.TRUNCATED
        return sample
    for one_sample in samples:
        one_sample.reward = sum(c.isdigit() for c in one_sample.response) / max(1, len(one_sample.response))
    return samples
