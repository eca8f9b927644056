"""What stands between a client and an engine: forwards requests, and changes what a test wants changed."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp
from aiohttp import web

from tests.support.loopback import served

HANDED_ON = ("Authorization", "Content-Type")


async def forward(
    request: web.Request,
    target: str,
    change: Callable[[bytes], bytes] = lambda piece: piece,
    body: bytes | None = None,
) -> web.StreamResponse:
    """Asks `target` the same, and answers what it answers, piece by piece as it comes, each changed by `change`.

    `body`: in place of the request's own.
    """
    headers = {name: request.headers[name] for name in HANDED_ON if name in request.headers}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
        session.request(
            request.method, f"{target}{request.path_qs}", data=body or await request.read(), headers=headers
        ) as answer,
    ):
        handed_on = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
        await handed_on.prepare(request)
        async for piece in answer.content.iter_any():
            await handed_on.write(change(piece))
        return handed_on


@dataclass
class LyingProxy:
    """An engine at another address. While it `lies`, it reports a wrong digest of each tensor; while it is `silent`, it
    brings no tokens.
    """

    target: str
    url: str = ""
    lies: bool = False
    silent: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)
    told: int = 0
    """How many reports it has changed, and requests it has kept."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.silent and request.path == "/generate":
            self.told += 1
            await self.over.wait()
        if not (self.lies and request.path == "/weights_checker"):
            return await forward(request, self.target)
        self.told += 1
        return await forward(request, self.target, lambda piece: re.sub(rb'"[0-9a-f]{16}', b'"' + b"0" * 16, piece))


@dataclass
class LockedProxy:
    """An engine that asks for a key, at another address: all but its health checks are for those who have it."""

    target: str
    key: str
    url: str = ""
    refused: list[str] = field(default_factory=list)
    """What was asked without the key."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path != "/health" and request.headers.get("Authorization") != f"Bearer {self.key}":
            self.refused.append(request.path)
            raise web.HTTPUnauthorized
        return await forward(request, self.target)


class Proxy(Protocol):
    """Something between a client and an engine."""

    url: str
    """Where it answers; set by `between`."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """One request."""
        ...


@contextlib.contextmanager
def between(proxy: Proxy, on_end: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Serves on a free port of the loopback for the block, in a thread of its own, which calls `on_end` at the end."""
    there, loop, over = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", proxy.handle)
        async with served(app) as proxy.url:
            there.set()
            await over.wait()
            on_end()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert there.wait(30), "the proxy does not start"
    try:
        yield
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(30)
        loop.close()


@contextlib.contextmanager
def lying(target: str) -> Iterator[LyingProxy]:
    """An engine behind one that lies, for the block."""
    proxy = LyingProxy(target)
    with between(proxy, proxy.over.set):
        yield proxy
