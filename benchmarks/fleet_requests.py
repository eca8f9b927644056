"""The client of many engines: what the end of everything costs, what membership changes do to its event loop.

    python -m benchmarks.fleet_requests --engines 64 --requests 1024 --json benchmarks/results/fleet_requests.json

Fake engines in the process of the client, on its event loop, so that all work is counted. Aborts are real HTTP, one
server per engine. Streams are real HTTP with `--sockets`; without, they are queues in memory, because 65,536 of them
are as many open files, more than a process may have on a common machine. Each stream brings an event of 32 tokens
every `--every-s`.

Measured: the time until all requests run; the longest stall of the event loop while engines are dismissed and
admitted under them, and what was lost of them; the time of `abort_scope` until the last request has come back with its
tokens; the processor time of one event.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from slime.rollout.call import Call
from slime.rollout.client import REQUEST_SCOPE, EngineClient, RequestScope
from slime.rollout.wire import allow_many_connections, collect_garbage_rarely

INTERVAL, PROMPT_TOKENS, MAX_NEW_TOKENS = 32, 64, 100_000
STALL_POLL_S = 0.005


def event(body: dict[str, Any], sent: int, finish: dict[str, Any] | None = None, num: int = INTERVAL) -> bytes:
    """An event as SGLang sends it; the id of a token is its place in the sequence."""
    first = len(body["input_ids"]) + sent
    meta = {
        "finish_reason": finish,
        "weight_version": "1",
        "prompt_tokens": len(body["input_ids"]),
        "output_token_logprobs": [[-0.5, first + i, None] for i in range(num)],
    }
    out = {"text": "x" * num, "output_ids": list(range(first, first + num)), "meta_info": meta}
    return b"data: " + orjson.dumps(out) + b"\n\n"


class FakeEngine:
    """Takes requests from memory or HTTP; one timer sends the events of all, a part of them each time."""

    def __init__(self, every_s: float) -> None:
        self.every_s, self.running, self.url = every_s, dict[str, "Stream"](), ""
        self.num_aborts = 0

    def begin(self, body: dict[str, Any]) -> Stream:
        """A request that is sampled from now on."""
        stream = self.running[body["rid"]] = Stream(body)
        stream.due = time.monotonic() + random.random() * self.every_s
        return stream

    async def work(self) -> None:
        """Sends what is due."""
        while True:
            now = time.monotonic()
            for stream in list(self.running.values()):
                if stream.due <= now:
                    stream.send()
                    stream.due += self.every_s
            await asyncio.sleep(self.every_s / 50)

    async def abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.num_aborts += 1
        for rid in list(self.running) if body["abort_all"] else [body["rid"]]:
            stream = self.running.pop(rid, None)
            if stream is not None:
                stream.send({"type": "abort"}, num=3)
        return web.Response()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        response = web.StreamResponse()
        await response.prepare(request)
        stream = self.begin(body)
        while body["rid"] in self.running or not stream.empty():
            await response.write(await stream.readany())
        return response


class Stream:
    """The answer to one request: what `Wire` needs of an `aiohttp.ClientResponse`."""

    status = 200

    def __init__(self, body: dict[str, Any]) -> None:
        self.body, self.sent, self.due = body, 0, 0.0
        self.content = self
        self._chunks: asyncio.Queue[bytes] = asyncio.Queue()

    def send(self, finish: dict[str, Any] | None = None, num: int = INTERVAL) -> None:
        self._chunks.put_nowait(event(self.body, self.sent, finish, num))
        self.sent += num

    def empty(self) -> bool:
        return self._chunks.empty()

    async def readany(self) -> bytes:
        return await self._chunks.get()

    def read_nowait(self, _num: int) -> bytes:
        return b""

    def at_eof(self) -> bool:
        return True

    def release(self) -> None:
        """Nothing to give back."""

    close = release


async def serve(engine: FakeEngine) -> Callable[[], Any]:
    """Serves on a free port; returns what ends it."""
    app = web.Application()
    app.router.add_post("/generate", engine.generate)
    app.router.add_post("/abort_request", engine.abort)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    assert site._server is not None
    engine.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    return runner.cleanup


class Stalls:
    """How late the event loop is, looked at all the time."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._task = asyncio.create_task(self._look())

    async def _look(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(STALL_POLL_S)
            self.worst_s = max(self.worst_s, time.monotonic() - began - STALL_POLL_S)

    def take(self) -> float:
        """The worst since the last call."""
        worst_s, self.worst_s = self.worst_s, 0.0
        return worst_s


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    engines = [FakeEngine(options.every_s) for _ in range(options.engines)]
    ends = [await serve(engine) for engine in engines]
    workers = [asyncio.create_task(engine.work()) for engine in engines]
    by_url = {engine.url: engine for engine in engines}
    client = EngineClient(*by_url, max_concurrency=2 * options.requests)
    if not options.sockets:

        async def post(url: str, payload: dict[str, Any]) -> Stream:
            return by_url[url.removesuffix("/generate")].begin(orjson.loads(orjson.dumps(payload)))

        client._wire.post = post  # type: ignore[assignment,method-assign]
    scope, stalls, total = RequestScope(), Stalls(), options.engines * options.requests
    REQUEST_SCOPE.set(scope)
    params = {"temperature": 1.0, "max_new_tokens": MAX_NEW_TOKENS}
    began = time.monotonic()
    tasks = []
    for number in range(total):
        ids = [number, *range(1, PROMPT_TOKENS)]
        tasks.append(asyncio.create_task(client.generate(ids, params, session_id=f"{number}")))
        if number % 256 == 0:
            await asyncio.sleep(0)
    while sum(len(engine.running) for engine in engines) < total:
        await asyncio.sleep(0.05)
    out: dict[str, Any] = {"start_s": time.monotonic() - began, "worst_stall_s_start": stalls.take()}
    await asyncio.sleep(options.every_s)
    out["worst_stall_s_steady"] = stalls.take()
    out |= await change(client, engines, stalls, options.changes)
    stalls.take()
    before = sum(engine.num_aborts for engine in engines)
    began, cpu_s = time.monotonic(), time.process_time()
    await client.abort_scope(scope)
    out["abort_delivered_s"] = time.monotonic() - began
    answers = await asyncio.gather(*tasks)
    out["abort_all_s"], out["abort_all_cpu_s"] = time.monotonic() - began, time.process_time() - cpu_s
    out["abort_posts"] = sum(engine.num_aborts for engine in engines) - before
    out["worst_stall_s_abort"] = stalls.take()
    for answer in answers:  # law 1: no token lost, none twice
        assert answer.tokens == tuple(range(PROMPT_TOKENS, PROMPT_TOKENS + len(answer.tokens)))
    out["answers"], out["tokens"] = len(answers), sum(len(a.tokens) for a in answers)
    for task in (*workers, stalls._task):
        task.cancel()
    await client.close()
    for end in ends:
        await end()
    return out


async def change(client: EngineClient, engines: list[FakeEngine], stalls: Stalls, num: int) -> dict[str, Any]:
    """Dismisses engines under their requests and admits them again, one every half second."""
    worst, rng = [], random.Random(0)
    for _ in range(num):
        engine = rng.choice(engines)
        client.dismiss([engine.url])
        engine.running.clear()
        await asyncio.sleep(0.5)
        client.admit([engine.url])
        await asyncio.sleep(0.5)
        worst.append(stalls.take())
    return {"changes": num, "worst_stall_s_changes": max(worst), "median_stall_s_changes": statistics.median(worst)}


def event_cost(tokens: int, number: int = 2000) -> float:
    """Microseconds of processor time that the client spends on an event of so many tokens, reading aside."""
    call = Call([1] * PROMPT_TOKENS, {"max_new_tokens": 10**9})
    payload = call.payload("r", tokens)
    pieces = [event(payload, i * tokens, num=tokens)[6:-2] for i in range(number)]
    began = time.process_time()
    for piece in pieces:
        call.take(orjson.loads(piece))
    return (time.process_time() - began) / number * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1024, help="per engine")
    parser.add_argument("--every-s", type=float, default=30.0, help="between two events of a request")
    parser.add_argument("--changes", type=int, default=8, help="engines dismissed and admitted again")
    parser.add_argument("--sockets", action="store_true", help="streams over HTTP; two open files for each")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    allow_many_connections()
    collect_garbage_rarely()
    name = f"{options.engines}x{options.requests}{' over HTTP' if options.sockets else ''}"
    made = asyncio.run(measure(options))
    # The machine may do other work: processor time of this process is what compares.
    costs = {str(n): round(event_cost(n), 1) for n in (1, 8, 32, 128)}
    found = {name: {k: round(v, 4) if isinstance(v, float) else v for k, v in made.items()}}
    known = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    known |= {**found, "event_us_by_tokens": costs, "cpus": os.cpu_count(), "load_average": os.getloadavg()[0]}
    if options.json:
        options.json.write_text(json.dumps(known, indent=1) + "\n")
    print(json.dumps(known, indent=1))


if __name__ == "__main__":
    main()
