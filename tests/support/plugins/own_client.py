"""An agent framework with an HTTP client of its own, one for all samples, which streams and knows of no key."""

from __future__ import annotations

import json

import httpx

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.types import Sample

_CLIENTS = {}


class EngineModel:
    """Keeps the tokens of a conversation, as token-in, token-out frameworks do."""

    def __init__(self, base_url, params):
        self.base_url, self.params = base_url, params
        self.tokens, self.loss_mask, self.log_probs = [], [], []

    @property
    def client(self):
        if self.base_url not in _CLIENTS:
            _CLIENTS[self.base_url] = httpx.AsyncClient(base_url=self.base_url, timeout=httpx.Timeout(600.0))
        return _CLIENTS[self.base_url]

    def feed(self, ids):
        self.tokens = self.tokens + list(ids)
        self.loss_mask += [0] * len(ids)
        self.log_probs += [0.0] * len(ids)

    async def answer(self):
        payload = {"input_ids": self.tokens, "sampling_params": self.params, "return_logprob": True, "stream": True}
        last = None
        async with self.client.stream("POST", "/generate", json=payload) as stream:
            stream.raise_for_status()
            async for line in stream.aiter_lines():
                if line.startswith("data:") and line[5:].strip() != "[DONE]":
                    last = json.loads(line[5:])
        pairs = last["meta_info"]["output_token_logprobs"]
        self.tokens = self.tokens + [pair[1] for pair in pairs]
        self.loss_mask += [1] * len(pairs)
        self.log_probs += [pair[0] for pair in pairs]
        return last["text"], last["meta_info"]["finish_reason"]["type"]


async def generate(args, sample, sampling_params):
    state = GenerateState(args)
    model = EngineModel(f"http://{args.sglang_router_ip}:{args.sglang_router_port}", sampling_params)
    async with httpx.AsyncClient() as health:
        assert (await health.get(f"{model.base_url}/health")).status_code == 200
    prompt_ids = state.tokenizer.encode(sample.prompt, add_special_tokens=False)
    model.feed(prompt_ids)
    text, ended = await model.answer()
    model.feed(state.tokenizer.encode(f"[{len(text)}]", add_special_tokens=False))
    more, ended = await model.answer()
    num = len(prompt_ids)
    sample.tokens, sample.response_length = model.tokens, len(model.tokens) - num
    sample.loss_mask, sample.rollout_log_probs = model.loss_mask[num:], model.log_probs[num:]
    sample.response = f"{text}{more}"
    sample.status = Sample.Status.TRUNCATED if ended == "length" else Sample.Status.COMPLETED
    return sample
