"""The client of many engines: the time to end all requests, and stalls of its event loop when engines join and leave.

    python -m benchmarks.fleet_requests --engines 64 --requests 1024 --json benchmarks/results/fleet_requests.json

The engines are fakes in separate processes (`benchmarks.fleet_engines`). Aborts use HTTP, and so do streams with
`--sockets`. Without this flag, the streams of a process share one connection, because 65,536 connections would need as
many open files, more than a process may usually have. Each stream has an event of 32 tokens every `--every-s`.

Measured: the time until all requests run; the longest stall of the event loop while engines are dismissed and admitted
under running requests; the time of `abort_scope` until the last request has returned with its tokens; the client's
processor time for each, and for one event. Other work on the machine increases times and stalls, so compare processor
times; the load average shows how busy the machine was.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from benchmarks.fleet_engines import FRAME, event, frames
from slime.rollout.client.call import Call
from slime.rollout.client.engine_client import REQUEST_SCOPE, EngineClient, RequestScope
from slime.rollout.client.wire import allow_many_connections, collect_garbage_rarely

PROMPT_TOKENS, MAX_NEW_TOKENS = 64, 100_000
STALL_POLL_S = 0.005
PROCESSES = 2
MOVED_LIMIT_S = 60.0


class Stream:
    """The response to one request in a shared connection: the part of `aiohttp.ClientResponse` that the client uses."""

    status = 200

    def __init__(self, number: int, link: Link) -> None:
        self.content, self._number, self._link = self, number, link
        self._chunks, self._ended = list[bytes](), False
        self._waiter: asyncio.Future[None] | None = None
        self.begun = asyncio.get_running_loop().create_future()

    def feed(self, chunk: bytes) -> None:
        """The first empty frame is the head of the response, and the next empty frame is its end."""
        if not chunk:
            self._ended = self.begun.done()
            if not self._ended:
                self.begun.set_result(None)
            return
        self._chunks.append(chunk)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def readany(self) -> bytes:
        while not self._chunks:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        chunks, self._chunks = b"".join(self._chunks), []
        return chunks

    def read_nowait(self, _num: int) -> bytes:
        return b""

    def at_eof(self) -> bool:
        return True

    def release(self) -> None:
        """Ends the stream, which has no reader any more."""
        self._link.leave(self._number, ended=self._ended)

    close = release


class Link(asyncio.Protocol):
    """The connection with all streams of one process of engines."""

    def __init__(self) -> None:
        self._streams, self._rest, self._next = dict[int, tuple[Stream, int]](), bytearray(), 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for chunk, number, _ in frames(self._rest, data):
            if number in self._streams:
                self._streams[number][0].feed(chunk)

    async def post(self, engine: int, body: bytes) -> Stream:
        """Sends a request to the engine with this number in its process."""
        number, self._next = self._next, self._next + 1
        stream = Stream(number, self)
        self._streams[number] = stream, engine
        self._transport.write(FRAME.pack(len(body), number, engine) + body)
        try:
            await stream.begun
        except asyncio.CancelledError:
            stream.release()
            raise
        return stream

    def leave(self, number: int, *, ended: bool) -> None:
        """Tells the engine to drop an unfinished stream."""
        _, engine = self._streams.pop(number, (None, 0))
        if not ended:
            self._transport.write(FRAME.pack(0, number, engine))


@contextlib.asynccontextmanager
async def engines_of(options: argparse.Namespace) -> AsyncIterator[dict[str, tuple[Link, int]]]:
    """Returns address of an engine -> (shared connection of its process, number of the engine in the process)."""
    loop, out, running = asyncio.get_running_loop(), dict[str, tuple[Link, int]](), []
    each = [options.engines // PROCESSES + (i < options.engines % PROCESSES) for i in range(PROCESSES)]
    try:
        for num in each:
            words = ["-m", "benchmarks.fleet_engines", "--engines", str(num), "--every-s", str(options.every_s)]
            running.append(subprocess.Popen([sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert running[-1].stdout is not None
            ports = json.loads(await asyncio.to_thread(running[-1].stdout.readline))
            _, link = await loop.create_connection(Link, "127.0.0.1", ports["frames"])
            out |= {f"http://127.0.0.1:{port}": (link, i) for i, port in enumerate(ports["http"])}
        yield out
    finally:
        for one in running:
            one.communicate()


async def asked(urls: list[str]) -> tuple[int, int]:
    """Returns the number of running requests at all engines, and the number of aborts sent to them."""
    async with aiohttp.ClientSession() as session:
        found = [await (await session.get(f"{url}/state")).json(content_type=None) for url in urls]
    return sum(one["running"] for one in found), sum(one["num_aborts"] for one in found)


class Stalls:
    """Records how late the event loop is, and its processor time meanwhile."""

    def __init__(self) -> None:
        self.worst_s = self.worst_cpu_s = 0.0
        self._task = asyncio.create_task(self._look())

    async def _look(self) -> None:
        while True:
            began, cpu_s = time.monotonic(), time.thread_time()
            await asyncio.sleep(STALL_POLL_S)
            self.worst_s = max(self.worst_s, time.monotonic() - began - STALL_POLL_S)
            self.worst_cpu_s = max(self.worst_cpu_s, time.thread_time() - cpu_s)

    def take(self) -> tuple[float, float]:
        """Returns the longest delays since the last call, in clock time and in processor time."""
        worst = self.worst_s, self.worst_cpu_s
        self.worst_s = self.worst_cpu_s = 0.0
        return worst

    def end(self) -> None:
        self._task.cancel()


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    async with engines_of(options) as links:
        client = EngineClient(*links, max_concurrency=2 * options.requests)
        if not options.sockets:

            async def post(url: str, payload: dict[str, Any]) -> Stream:
                link, number = links[url.removesuffix("/generate")]
                return await link.post(number, orjson.dumps(payload))

            client._wire.post = post  # type: ignore[assignment,method-assign]
        try:
            return await walk(client, list(links), options)
        finally:
            await client.close()


async def walk(client: EngineClient, urls: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Measures the start of all requests, a quiet phase, membership changes, and the end of all requests."""
    scope, stalls, total = RequestScope(), Stalls(), options.engines * options.requests
    REQUEST_SCOPE.set(scope)
    params = {"temperature": 1.0, "max_new_tokens": MAX_NEW_TOKENS}
    began, cpu_s = time.monotonic(), time.process_time()
    tasks = []
    for number in range(total):
        ids = [number, *range(1, PROMPT_TOKENS)]
        tasks.append(asyncio.create_task(client.generate(ids, params, session_id=f"{number}")))
        if number % 256 == 0:
            await asyncio.sleep(0)
    await until_running(urls, total)
    out: dict[str, Any] = {"start_s": time.monotonic() - began, "start_cpu_s": time.process_time() - cpu_s}
    out["worst_stall_s_start"], out["worst_stall_cpu_s_start"] = stalls.take()
    cpu_s = time.process_time()
    await asyncio.sleep(options.every_s)
    out |= {"steady_s": options.every_s, "steady_cpu_s": time.process_time() - cpu_s}
    out["worst_stall_s_steady"], out["worst_stall_cpu_s_steady"] = stalls.take()
    out |= await change(client, urls, stalls, options.changes)
    await until_running(urls, total)
    stalls.take()
    _, before = await asked(urls)
    began, cpu_s = time.monotonic(), time.process_time()
    await client.abort_scope(scope)
    out["abort_delivered_s"] = time.monotonic() - began
    answers = await asyncio.gather(*tasks)
    out["abort_all_s"], out["abort_all_cpu_s"] = time.monotonic() - began, time.process_time() - cpu_s
    out["worst_stall_s_abort"], out["worst_stall_cpu_s_abort"] = stalls.take()
    running, aborts = await asked(urls)
    out["abort_posts"] = aborts - before
    assert not running, f"{running} requests are still there"
    for answer in answers:  # law 1: no token is lost or repeated
        assert answer.tokens == tuple(range(PROMPT_TOKENS, PROMPT_TOKENS + len(answer.tokens)))
    out["answers"], out["tokens"] = len(answers), sum(len(a.tokens) for a in answers)
    stalls.end()
    return out


async def until_running(urls: list[str], total: int) -> None:
    """Waits until the engines run this many requests."""
    while (await asked(urls))[0] != total:
        await asyncio.sleep(0.25)


async def change(client: EngineClient, urls: list[str], stalls: Stalls, num: int) -> dict[str, Any]:
    """Dismisses engines with running requests and admits them again, one every second."""
    worst, rng, cpu_s = [], random.Random(0), time.process_time()
    for _ in range(num):
        url = rng.choice(urls)
        client.dismiss([url])
        await asyncio.sleep(0.5)
        client.admit([url])
        await asyncio.sleep(0.5)
        worst.append(stalls.take())
    by_clock, of_cpu = zip(*worst, strict=True)
    return {
        "changes": num,
        "changes_cpu_s": time.process_time() - cpu_s,
        "worst_stall_s_changes": max(by_clock),
        "median_stall_s_changes": statistics.median(by_clock),
        "worst_stall_cpu_s_changes": max(of_cpu),
    }


def event_cost(tokens: int, number: int = 2000) -> float:
    """Returns the client's processor time per event of this many tokens in microseconds, without reading the socket."""
    call = Call([1] * PROMPT_TOKENS, {"max_new_tokens": 10**9})
    call.payload("r", tokens)
    pieces = [event(PROMPT_TOKENS, i * tokens, num=tokens)[6:-2] for i in range(number)]
    began = time.process_time()
    for piece in pieces:
        call.take_event(orjson.loads(piece))
    return (time.process_time() - began) / number * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1024, help="requests per engine")
    parser.add_argument("--every-s", type=float, default=30.0, help="seconds between two events of a request")
    parser.add_argument("--changes", type=int, default=8, help="number of engines to dismiss and admit again")
    parser.add_argument("--sockets", action="store_true", help="use HTTP streams; each needs an open file")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    allow_many_connections()
    collect_garbage_rarely()
    name = f"{options.engines}x{options.requests}{' over HTTP' if options.sockets else ''}"
    made = asyncio.run(measure(options)) | {"cpus": os.cpu_count(), "load_average": os.getloadavg()[0]}
    costs = {str(n): round(event_cost(n), 1) for n in (1, 8, 32, 128)}
    found = {name: {k: round(v, 4) if isinstance(v, float) else v for k, v in made.items()}}
    known = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    known |= {**found, "event_us_by_tokens": costs}
    if options.json:
        options.json.write_text(json.dumps(known, indent=1) + "\n")
    print(json.dumps(known, indent=1))


if __name__ == "__main__":
    main()
