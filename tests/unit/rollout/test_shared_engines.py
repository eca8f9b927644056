"""Law: of engines that somebody else started the client ends its own requests, and leaves those of others alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from slime.rollout.client.engine_client import REQUEST_SCOPE, TOGETHER, EngineClient, RequestScope
from tests.support.fake_engine import FakeEngine, serve

NUM, PARAMS = 2 * TOGETHER, {"temperature": 1.0, "max_new_tokens": 10_000}
"""More requests than it takes for the end of everything to be one message."""


async def paused(client: EngineClient, engine: FakeEngine, scope: RequestScope) -> None:
    await client.pause(scope)


async def aborted(client: EngineClient, engine: FakeEngine, scope: RequestScope) -> None:
    await client.abort_scope(scope)


async def dismissed(client: EngineClient, engine: FakeEngine, scope: RequestScope) -> None:
    client.dismiss([engine.url])
    await client.drain()


async def ended(engine: FakeEngine) -> bool:
    """Whether the engine has nothing to do any more, or soon."""
    for _ in range(1000):
        if not engine.running:
            return True
        await asyncio.sleep(0.01)
    return False


@pytest.mark.parametrize("ends", [paused, aborted, dismissed])
@pytest.mark.parametrize("shared", [True, False])
def test_others_keep_their_requests(
    ends: Callable[[EngineClient, FakeEngine, RequestScope], Awaitable[None]], shared: bool
) -> None:
    engine = FakeEngine(tick_s=0.01)

    async def main() -> None:
        async with serve(engine):
            client, scope = EngineClient(engine.url, shared=shared, max_concurrency=NUM), RequestScope()
            REQUEST_SCOPE.set(scope)
            calls = [asyncio.create_task(client.generate([5, i], PARAMS)) for i in range(NUM)]
            while len(engine.running) < NUM:
                await asyncio.sleep(0.01)
            await ends(client, engine, scope)
            assert await ended(engine)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            await client.drain()
            assert ("" in engine.aborted) is (ends is paused and not shared)
            await client.close()

    asyncio.run(main())
