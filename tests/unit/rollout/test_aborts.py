"""What ends requests at engines: those that are meant, all of them, by few messages, and none of anybody else."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from slime.core.text import EngineKeys
from slime.rollout.client.engine_client import REQUEST_SCOPE, EngineClient, RequestScope
from tests.support.fake_engine import FakeEngine, serve

LONG = {"temperature": 1.0, "max_new_tokens": 10_000}


async def started(client: EngineClient, engines: list[FakeEngine], first: int, num: int) -> list[asyncio.Task[Any]]:
    """So many more requests, which run."""
    before = sum(len(engine.running) for engine in engines)
    tasks = [asyncio.create_task(client.generate([first + i], LONG, returns_partial=True)) for i in range(num)]
    while sum(len(engine.running) for engine in engines) < before + num:
        await asyncio.sleep(0.01)
    return tasks


async def ended(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_end_of_a_scope_is_one_id_for_each_engine_and_ends_nothing_else() -> None:
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(serve(FakeEngine(tick_s=0.01))) for _ in range(3)]
        urls = [engine.url for engine in engines]
        client, neighbour, scope, other = EngineClient(*urls), EngineClient(*urls), RequestScope(), RequestScope()
        REQUEST_SCOPE.set(other)
        others = await started(client, engines, 0, 12) + await started(neighbour, engines, 20, 12)
        REQUEST_SCOPE.set(scope)
        tasks = await started(client, engines, 50, 120)
        own = {one.rid for one in scope.tries}
        rids = [own & set(engine.running) for engine in engines]
        await client.abort_scope(scope)
        assert {r.finish_reason for r in await asyncio.gather(*tasks)} == {"abort"}
        for engine, own in zip(engines, rids, strict=True):
            assert len(set(engine.aborted)) == 1 and all(rid.startswith(engine.aborted[0]) for rid in own)
        assert not any(task.done() for task in others) and sum(len(engine.running) for engine in engines) == 24
        await ended(others)
        await client.close()
        await neighbour.close()


async def test_the_end_of_a_dismissed_engine_ends_what_its_client_has_there() -> None:
    async with serve(FakeEngine(tick_s=0.01)) as engine:
        client, neighbour = EngineClient(engine.url), EngineClient(engine.url)
        others = await started(neighbour, [engine], 0, 9)
        tasks = await started(client, [engine], 20, 40)
        first = [rid for rid in engine.running if rid not in {t.rid for t in neighbour._pool.tries}]
        client.dismiss([engine.url])
        client.admit([engine.url])
        # The engine may see connections that end before it reads the abort.
        while not engine.aborted or set(first) & engine.running.keys() or len(engine.running) < 49:
            await asyncio.sleep(0.01)
        assert len(set(engine.aborted)) == 1
        assert not any(task.done() for task in (*tasks, *others)), "the end of what was there ended what came after it"
        await ended(tasks + others)
        await client.close()
        await neighbour.close()


async def test_an_engine_that_takes_no_marker_is_asked_for_each_request() -> None:
    """Also: who generates shows one key, who ends requests the other one."""
    async with serve(FakeEngine(tick_s=0.01)) as engine:
        client, scope = EngineClient(engine.url, keys=EngineKeys("use", "admin")), RequestScope()
        REQUEST_SCOPE.set(scope)
        tasks = await started(client, [engine], 0, 40)
        rids = {one.rid for one in scope.tries}
        engine.faults.append(503)
        await client.abort_scope(scope)
        assert {r.finish_reason for r in await asyncio.gather(*tasks)} == {"abort"}
        assert rids <= set(engine.aborted)
        assert (engine.keys, engine.control_keys) == ({"Bearer use"}, {"Bearer admin"})
        await client.close()


async def test_an_abort_goes_to_the_engine_that_has_the_request() -> None:
    async with serve(FakeEngine(tick_s=0.01)) as one, serve(FakeEngine(tick_s=0.01)) as two:
        client = EngineClient(one.url, two.url)
        tasks = [asyncio.create_task(client.generate([i], LONG)) for i in range(6)]
        while len(one.running) + len(two.running) < 6:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.drain()
        for engine in (one, two):
            assert sorted(engine.aborted) == sorted(r["rid"] for r in engine.requests)
        await client.close()


async def test_the_end_of_a_scope_ends_what_waits_for_an_engine_of_another_client() -> None:
    policy, judge, scope = EngineClient(), EngineClient(), RequestScope()
    REQUEST_SCOPE.set(scope)
    waiting = asyncio.create_task(judge.generate([1], LONG, returns_partial=True))
    while not judge._pool._waiting:
        await asyncio.sleep(0)
    await policy.abort_scope(scope)
    assert (await waiting).finish_reason == "abort"
    await policy.close()
    await judge.close()
