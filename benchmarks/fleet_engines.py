"""Fake engines for `benchmarks.fleet_requests`, in a separate process that prints their ports and serves until EOF.

    python -m benchmarks.fleet_engines --engines 32 --every-s 30

They implement only what a client needs from SGLang 0.5.16: `/generate` streams events of 32 tokens, one every
`--every-s`, and `/abort_request` ends the requests whose ids begin with the given id, if this id is itself the id of a
request. The id of a token is its position in the sequence, so a reader notices lost tokens.

HTTP is read and written by hand, because a server as costly as the client would take processor time from it. For more
streams than a process may have open files, the first port also accepts a connection that carries all requests and
events of the process in frames of (length, stream, engine).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import orjson

from slime.rollout.client.wire import allow_many_connections

INTERVAL = 32
FRAME = struct.Struct("<III")
"""Head of a frame: the number of bytes that follow, the stream's number, and the engine's number."""
LAST = 3
"""Number of unsent tokens at an abort."""
TURNS = 50
"""Number of checks for due events between two events of a request."""


def event(num_prompt: int, sent: int, finish: dict[str, Any] | None = None, num: int = INTERVAL) -> bytes:
    """Returns an event as SGLang sends it."""
    first = num_prompt + sent
    meta = {
        "finish_reason": finish,
        "weight_version": "1",
        "prompt_tokens": num_prompt,
        "output_token_logprobs": [[-0.5, first + i, None] for i in range(num)],
    }
    out = {"text": "x" * num, "output_ids": list(range(first, first + num)), "meta_info": meta}
    return b"data: " + orjson.dumps(out) + b"\n\n"


class Request:
    """A running request. `send` takes bytes, `end` ends the stream."""

    def __init__(self, num_prompt: int, due: float, send: Callable[[bytes], None], end: Callable[[], None]) -> None:
        self.num_prompt, self.due, self.send, self.end, self.sent = num_prompt, due, send, end, 0

    def work(self, finish: dict[str, Any] | None = None, num: int = INTERVAL) -> None:
        """Sends an event."""
        self.send(event(self.num_prompt, self.sent, finish, num))
        self.sent += num


class Engine:
    """A fake engine: its requests, and its due events."""

    def __init__(self, every_s: float) -> None:
        self.every_s, self.running, self.num_aborts = every_s, dict[str, Request](), 0

    def begin(self, body: dict[str, Any], send: Callable[[bytes], None], end: Callable[[], None]) -> str:
        """Starts a request; returns its id."""
        due = time.monotonic() + random.random() * self.every_s
        self.running[body["rid"]] = Request(len(body["input_ids"]), due, send, end)
        return str(body["rid"])

    def work(self, now: float) -> None:
        """Sends due events."""
        for request in self.running.values():
            if request.due <= now:
                request.work()
                request.due += self.every_s

    def abort(self, body: dict[str, Any]) -> None:
        """Ends all requests whose ids begin with this id. Like SGLang, does nothing if the id is unknown."""
        self.num_aborts += 1
        if body["abort_all"] or body["rid"] in self.running:
            for rid in [rid for rid in self.running if body["abort_all"] or rid.startswith(body["rid"])]:
                request = self.running.pop(rid)
                request.work({"type": "abort"}, LAST)
                request.end()


class Http(asyncio.Protocol):
    """An HTTP/1.1 connection with one request at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._rest, self._rid = engine, b"", ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, _problem: Exception | None) -> None:
        self._engine.running.pop(self._rid, None)

    def data_received(self, data: bytes) -> None:
        self._rest += data
        head, mark, rest = self._rest.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0] or 0)
        if not mark or len(rest) < length:
            return
        body, self._rest = rest[:length], rest[length:]
        match head.split(b" ", 2)[1]:
            case b"/generate":
                self._transport.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
                )
                self._rid = self._engine.begin(orjson.loads(body), self._send, self._end)
            case b"/abort_request":
                self._engine.abort(orjson.loads(body))
                self._answer(b"")
            case _:
                engine = self._engine
                self._answer(orjson.dumps({"running": len(engine.running), "num_aborts": engine.num_aborts}))

    def _answer(self, body: bytes) -> None:
        self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    def _send(self, event: bytes) -> None:
        self._transport.write(b"%x\r\n%s\r\n" % (len(event), event))

    def _end(self) -> None:
        self._transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        self._rid = ""


class Frames(asyncio.Protocol):
    """A connection with many streams. An empty frame closes a stream, in either direction."""

    def __init__(self, engines: list[Engine]) -> None:
        self._engines, self._rest, self._rids = engines, bytearray(), dict[int, str]()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for body, stream, number in frames(self._rest, data):
            engine = self._engines[number]
            if body:
                send, end = self._writer(stream)
                self._rids[stream] = engine.begin(orjson.loads(body), send, end)
            else:
                engine.running.pop(self._rids.pop(stream, ""), None)

    def _writer(self, stream: int) -> tuple[Callable[[bytes], None], Callable[[], None]]:
        write = self._transport.write
        write(FRAME.pack(0, stream, 0))  # in place of the head of an HTTP response
        return lambda event: write(FRAME.pack(len(event), stream, 0) + event), lambda: self._end(stream)

    def _end(self, stream: int) -> None:
        self._transport.write(FRAME.pack(0, stream, 0))
        self._rids.pop(stream, None)


def frames(rest: bytearray, data: bytes) -> list[tuple[bytes, int, int]]:
    """Yields the complete frames in `rest` and `data` as (bytes, stream, engine); leaves the remainder in `rest`."""
    rest += data
    out, at = [], 0
    while len(rest) >= at + FRAME.size:
        length, stream, number = FRAME.unpack_from(rest, at)
        end = at + FRAME.size + length
        if len(rest) < end:
            break
        out.append((bytes(rest[at + FRAME.size : end]), stream, number))
        at = end
    del rest[:at]
    return out


async def serve(options: argparse.Namespace) -> None:
    """Prints the ports as a line of JSON, then serves until standard input is closed."""
    loop, engines = asyncio.get_running_loop(), [Engine(options.every_s) for _ in range(options.engines)]

    async def port_of(make: Callable[[], asyncio.Protocol]) -> int:
        server = await loop.create_server(make, "127.0.0.1", 0, backlog=4096)
        return int(server.sockets[0].getsockname()[1])

    ports = [await port_of(lambda engine=engine: Http(engine)) for engine in engines]  # type: ignore[misc]
    print(json.dumps({"http": ports, "frames": await port_of(lambda: Frames(engines))}), flush=True)
    ended = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
    for engine in itertools.cycle(engines):  # not all at once, like real engines
        engine.work(time.monotonic())
        await asyncio.wait([ended], timeout=options.every_s / TURNS / len(engines))
        if ended.done():
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=32)
    parser.add_argument("--every-s", type=float, default=30.0, help="seconds between two events of a request")
    allow_many_connections()
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
