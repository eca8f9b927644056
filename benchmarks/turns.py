"""Turns per second of one process of the rollout side, with engines that respond immediately.

    python -m benchmarks.turns --json benchmarks/results/turns.json

64 scripted engines run in a separate process, which sends the same prepared response to every request: 32 tokens with
their log-probs in one event. The client sends contexts of 1k and 32k ids, 256 requests at a time. Results are turns per
second, the processor time of a turn in the client and in the engines, and stalls of the client's event loop (how late a
5 ms timer is). Both processes share two cores, so the engines reduce the number of turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fleet_engines import event
from slime.rollout.client.engine_client import EngineClient
from slime.rollout.client.wire import allow_many_connections, collect_garbage_rarely

PARAMS = {"temperature": 1.0, "max_new_tokens": 32}
ANSWER = event(64, 0, {"type": "length", "length": 32})
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n"
POLL_S = 0.005


class Scripted(asyncio.Protocol):
    """A connection that reads whole requests and sends the response to each."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._head, self._left = transport, b"", 0
        body = ANSWER + b"data: [DONE]\n\n"
        self._whole = HEAD % len(body) + body

    def data_received(self, data: bytes) -> None:
        if self._left == 0:
            self._head += data
            head, mark, rest = self._head.partition(b"\r\n\r\n")
            if not mark:
                return
            self._left = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0] or 0)
            self._head, data = b"", rest
        self._left -= len(data)
        if self._left == 0:
            self._transport.write(self._whole)


async def engines(num: int) -> None:
    """Prints the ports as a line of JSON, and serves until its standard input ends; then its processor seconds."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Scripted, "127.0.0.1", 0, backlog=4096) for _ in range(num)]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(time.process_time(), flush=True)


async def measure(client: EngineClient, context: int, seconds: float, at_once: int) -> dict[str, Any]:
    """Runs turns for a number of seconds."""
    ids = list(range(1, context + 1))
    num, late, over = 0, list[float](), False

    async def ask() -> None:
        nonlocal num
        while not over:
            await client.generate(ids, PARAMS)
            num += 1

    async def watch() -> None:
        while not over:
            began = time.perf_counter()
            await asyncio.sleep(POLL_S)
            late.append(time.perf_counter() - began - POLL_S)

    tasks = [asyncio.create_task(ask()) for _ in range(at_once)]
    await asyncio.sleep(min(2.0, seconds / 4))
    num, watching = 0, asyncio.create_task(watch())
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.sleep(seconds)
    took_s, cpu_s, turns = time.perf_counter() - began, time.process_time() - cpu, num
    over = True
    await asyncio.gather(*tasks, watching)
    return {
        "context": context,
        "turns_per_s": round(turns / took_s, 1),
        "client_ms_per_turn": round(1e3 * cpu_s / turns, 3),
        "stall_ms": {str(q): round(1e3 * float(np.quantile(late, q)), 1) for q in (0.5, 0.99, 0.999)},
    }


async def client_side(options: argparse.Namespace, ports: list[int]) -> list[dict[str, Any]]:
    client = EngineClient(*(f"http://127.0.0.1:{port}" for port in ports), vocab_size=151_936)
    collect_garbage_rarely()
    try:
        return [await measure(client, context, options.seconds, options.at_once) for context in (1024, 32 * 1024)]
    finally:
        await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--serve", action="store_true", help="run as the process of the engines")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    allow_many_connections()
    if options.serve:
        asyncio.run(engines(options.engines))
        return
    words = [sys.executable, "-m", "benchmarks.turns", "--serve", "--engines", str(options.engines)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as served:
        assert served.stdin is not None and served.stdout is not None
        try:
            found = asyncio.run(client_side(options, json.loads(served.stdout.readline())))
        finally:
            served.stdin.close()
    result = {
        "command": " ".join(["python", "-m", "benchmarks.turns", *sys.argv[1:]]),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "turns": found,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
