"""A buffer of trajectories as a service: a generator behind HTTP fills it, and a rollout function empties it."""

from __future__ import annotations

import asyncio
import threading

import aiohttp
from aiohttp import web

from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.async_utils import run
from slime.utils.types import Sample


class Buffer:
    """POST /start_rollout makes groups with the engine whose address it is given; POST /get_rollout_data takes them."""

    def __init__(self):
        self.items, self.tasks = [], set()
        self.app = web.Application()
        self.app.router.add_post("/start_rollout", self.start)
        self.app.router.add_post("/get_rollout_data", self.take)

    async def start(self, request):
        payload = await request.json()
        task = asyncio.create_task(self.fill(payload))
        self.tasks.add(task)
        return web.json_response({"message": "started"})

    async def fill(self, payload):
        async with aiohttp.ClientSession() as client:
            await asyncio.gather(*(self.one(client, payload, item) for item in payload["prompts"]))

    async def one(self, client, payload, item):
        asked = {"input_ids": item["ids"], "sampling_params": payload["sampling_params"], "return_logprob": True}
        async with client.post(f"{payload['remote_engine_url']}/generate", json=asked) as answer:
            output = await answer.json()
        pairs = output["meta_info"]["output_token_logprobs"]
        text = output["text"]
        digits = sum(character.isdigit() for character in text) / max(1, len(text))
        more = {"ids": [pair[1] for pair in pairs], "log_probs": [pair[0] for pair in pairs], "text": text}
        ended = output["meta_info"]["finish_reason"]["type"]
        self.items.append({"instance": item["instance"], "reward": digits, "ended": ended, **more})

    async def take(self, request):
        taken, self.items = self.items, []
        return web.json_response({"data": taken})


_URL = []


def service_url():
    """Of the service, in a thread of its own with a loop of its own."""
    if not _URL:
        started, loop = threading.Event(), asyncio.new_event_loop()

        async def serve():
            runner = web.AppRunner(Buffer().app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            _URL.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
            started.set()

        def main():
            loop.run_until_complete(serve())
            loop.run_forever()

        threading.Thread(target=main, daemon=True).start()
        started.wait()
    return _URL[0]


async def fetch(url, payload):
    async with aiohttp.ClientSession() as client, client.post(url, json=payload) as answer:
        return await answer.json()


async def rollout(args, data_source):
    state, url = GenerateState(args), service_url()
    groups = data_source.get_samples(args.rollout_batch_size)
    samples = {sample.index: sample for group in groups for sample in group}
    prompts = [
        {"instance": index, "ids": state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]}
        for index, sample in samples.items()
    ]
    engine = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    started = {"remote_engine_url": engine, "prompts": prompts, "sampling_params": state.sampling_params}
    await fetch(f"{url}/start_rollout", started)
    ids, num_filled = {one["instance"]: one["ids"] for one in prompts}, 0
    while num_filled < len(samples):
        for item in (await fetch(f"{url}/get_rollout_data", {}))["data"]:
            sample = samples[item["instance"]]
            sample.tokens = ids[item["instance"]] + item["ids"]
            sample.response, sample.response_length = item["text"], len(item["ids"])
            sample.loss_mask, sample.rollout_log_probs = [1] * len(item["ids"]), item["log_probs"]
            sample.reward = item["reward"]
            sample.status = Sample.Status.TRUNCATED if item["ended"] == "length" else Sample.Status.COMPLETED
            num_filled += 1
        await asyncio.sleep(0.05)
    return groups


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    assert not evaluation
    return RolloutFnTrainOutput(run(rollout(args, data_source)), {"rollout/from_buffer": 1.0})
