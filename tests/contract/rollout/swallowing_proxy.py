"""A proxy in front of an engine that swallows requests: the client waits for an answer that never comes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.support.forwarding import forward
from tests.support.loopback import served


@dataclass
class SwallowingProxy:
    """Forwards to `target`, but for the `/generate` requests that it was told to swallow."""

    target: str
    to_swallow: int = 1
    """How many of the next requests get no answer."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of all `/generate` requests, the swallowed ones included."""
    swallowed: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    _over: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/generate":
            self.requests.append(await request.json())
            if self.to_swallow:
                self.to_swallow -= 1
                self.swallowed.append(self.requests[-1])
                await self._over.wait()
        return await forward(request, self.target)


@contextlib.asynccontextmanager
async def swallowing(target: str, to_swallow: int = 1) -> AsyncIterator[SwallowingProxy]:
    """Serves on a free port of the loopback for the block."""
    proxy = SwallowingProxy(target, to_swallow)
    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", proxy.handle)
    async with served(app) as proxy.url:
        try:
            yield proxy
        finally:
            proxy._over.set()
