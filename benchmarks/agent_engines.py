"""Engine and agents for `benchmarks.agent_sessions`, in a separate process that takes orders as lines of JSON.

The engine implements what a client needs from SGLang's `/generate` stream and `/abort_request`. It works in steps, as a
real engine does: each step samples a token for every running request, and sends an event for each request that has
`stream_interval` unsent tokens, has just got its first token, or is at its end. Events have the size and content of
SGLang's: ids, log-probs with all their digits, text, and counts. They are made beforehand, so that the engine takes
little of the processor.

The agents use OpenAI's chat completions. Each runs its turns one after the other, and all agents run at once.
"""

from __future__ import annotations

import asyncio
import json
import random
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from benchmarks.fleet_engines import Engine, Http, Request
from slime.rollout.client.wire import allow_many_connections

CHAT = "/v1/chat/completions"
CONNECTS_EVERY_S = 0.0005


@dataclass(slots=True)
class Running:
    """A running request."""

    events: list[tuple[int, bytes]]
    """(number of sampled tokens at which it is due, bytes)."""
    send: Callable[[bytes], None]
    end: Callable[[], None]
    steps: int = 0
    next: int = 0
    due: int = field(init=False)

    def __post_init__(self) -> None:
        self.due = self.events[0][0]


class Stepping(Engine):
    """An engine that samples the same answer for every request, one token per step."""

    def __init__(self, ids: Sequence[int]) -> None:
        super().__init__(0.0)
        self._ids = list(ids)
        rng = random.Random(1)
        self._log_probs = [struct.unpack("f", struct.pack("f", -rng.random()))[0] for _ in ids]
        self._events: dict[tuple[int, int, int], list[tuple[int, bytes]]] = {}
        self.requests: dict[str, Running] = {}
        self.num_events = self.num_requests = self.num_tokens = 0

    def begin(self, body: dict[str, Any], send: Callable[[bytes], None], end: Callable[[], None]) -> str:
        params = body["sampling_params"]
        most = min(params["max_new_tokens"], len(self._ids))
        key = (params.get("stream_interval") or 1, len(body["input_ids"]), most)
        if key not in self._events:
            self._events[key] = list(self._made(*key))
        self.requests[body["rid"]] = Running(self._events[key], send, end)
        self.running[body["rid"]] = Request(0, 0.0, send, end)  # `Http` forgets it here when a connection is lost
        self.num_requests += 1
        return str(body["rid"])

    def _made(self, interval: int, num_prompt: int, num: int) -> Iterator[tuple[int, bytes]]:
        sent = 0
        reason = {"type": "stop", "matched": self._ids[-1]} if num == len(self._ids) else {"type": "length"}
        while sent < num:
            until = min(num, sent + (interval if sent else 1))
            new = self._ids[sent:until]
            meta = {
                "id": "0.0.0.0.",
                "finish_reason": reason if until == num else None,
                "prompt_tokens": num_prompt,
                "weight_version": "1",
                "total_retractions": 0,
                "reasoning_tokens": 0,
                "output_token_logprobs": [[self._log_probs[i], self._ids[i], None] for i in range(sent, until)],
                "completion_tokens": until,
                "cached_tokens": 0,
            }
            out = {"text": "word" * len(new), "output_ids": new, "meta_info": meta}
            yield until, b"data: " + orjson.dumps(out) + b"\n\n"
            sent = until

    def step(self) -> None:
        """Samples a token for each request, and sends the events that are due."""
        ended = []
        for rid, request in self.requests.items():
            request.steps += 1
            if request.steps < request.due:
                continue
            if rid not in self.running:
                ended.append(rid)
                continue
            request.send(request.events[request.next][1])
            self.num_events += 1
            request.next += 1
            if request.next == len(request.events):
                self.num_tokens += request.due
                ended.append(rid)
                request.end()
            else:
                request.due = request.events[request.next][0]
        for rid in ended:
            self.requests.pop(rid)
            self.running.pop(rid, None)

    def abort(self, body: dict[str, Any]) -> None:
        self.num_aborts += 1
        for rid in [rid for rid in self.requests if body["abort_all"] or rid.startswith(body["rid"])]:
            self.requests.pop(rid)
            self.running.pop(rid, None)

    async def run(self, step_s: float, over: asyncio.Event) -> None:
        """Makes a step every `step_s` while there is work; late steps are not made up for."""
        due = time.perf_counter()
        while not over.is_set():
            self.step()
            due = max(due + step_s, time.perf_counter())
            await asyncio.sleep(max(0.0, due - time.perf_counter()))


async def talk(http: aiohttp.ClientSession, order: dict[str, Any], key: str, first_s: list[float]) -> None:
    """Runs one agent."""
    history: list[dict[str, Any]] = list(order.get("history") or [{"role": "user", "content": "x" * 200}])
    headers = {"Authorization": f"Bearer {key}"}
    for _ in range(order["turns"]):
        body = {"model": "m", "messages": history, "stream": order["streams"], "max_tokens": order["max_tokens"]}
        began = time.perf_counter()
        async with http.post(f"{order['url']}{CHAT}", data=orjson.dumps(body), headers=headers) as response:
            assert response.status == 200, await response.text()
            if order["streams"]:
                data = await response.content.readany()
                first_s.append(time.perf_counter() - began)
                parts = [data]
                while data := await response.content.readany():
                    parts.append(data)
                text = "".join(
                    one["choices"][0]["delta"].get("content") or ""
                    for line in b"".join(parts).split(b"\n\n")
                    if line.startswith(b"data: {") and (one := orjson.loads(line[6:]))["choices"]
                )
                message = {"role": "assistant", "content": text}
            else:
                message = orjson.loads(await response.read())["choices"][0]["message"]
        assert message["content"], "an answer has text"
        history += [message, {"role": "user", "content": "line of text\n" * 10}]


async def obey(order: dict[str, Any], engine: Stepping) -> dict[str, Any]:
    """Runs the agents of an order."""
    over, first_s = asyncio.Event(), list[float]()
    stepping = asyncio.create_task(engine.run(order["step_s"], over))
    engine.num_events = engine.num_requests = engine.num_tokens = 0
    began, cpu = time.perf_counter(), time.process_time()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        agents = []
        for key in order[
            "keys"
        ]:  # not all at once: more than a listening socket's queue would try again a second later
            agents.append(asyncio.create_task(talk(http, order, key, first_s)))
            await asyncio.sleep(CONNECTS_EVERY_S)
        await asyncio.gather(*agents)
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    over.set()
    await stepping
    first_s.sort()
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "tokens": engine.num_tokens,
        "events": engine.num_events,
        "first_s": first_s[len(first_s) // 2] if first_s else None,
    }


async def serve() -> None:
    """Reads the ids of the answer, prints the port, and then obeys orders until standard input is closed."""
    engine = Stepping(json.loads(await asyncio.to_thread(sys.stdin.readline)))
    server = await asyncio.get_running_loop().create_server(lambda: Http(engine), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await obey(json.loads(line), engine)), flush=True)


if __name__ == "__main__":
    allow_many_connections()
    asyncio.run(serve())
