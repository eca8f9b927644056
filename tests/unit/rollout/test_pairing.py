"""Laws of engines that work in pairs: a request is at one of each kind, is ended at both, and outlives either."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from slime.core.errors import DeadlineExceeded, EngineError, RequestRejected
from slime.core.topology import bootstrap_of
from slime.rollout.client.engine_client import REQUEST_SCOPE, EngineClient, RequestScope
from tests.support.fake_engine import FakeEngine, serve
from tests.support.fake_pair import FakeDecode, FakePrefill, Rooms

PARAMS = {"temperature": 1.0, "max_new_tokens": 5}
LONG = {"temperature": 1.0, "max_new_tokens": 10_000}


class Fleet:
    """Some engines of each kind, and a client that knows them."""

    def __init__(self, prefill: list[FakePrefill], decode: list[FakeDecode], client: EngineClient) -> None:
        self.prefill, self.decode, self.client = prefill, decode, client

    @property
    def running(self) -> int:
        """Requests at all of them."""
        return sum(len(engine.running) for engine in (*self.prefill, *self.decode))


@contextlib.asynccontextmanager
async def fleet(num_prefill: int = 1, num_decode: int = 1, **settings: Any) -> AsyncIterator[Fleet]:
    async with contextlib.AsyncExitStack() as stack:
        rooms = Rooms()
        prefill = [await stack.enter_async_context(serve(FakePrefill(rooms=rooms))) for _ in range(num_prefill)]
        decode = [await stack.enter_async_context(serve(FakeDecode(rooms=rooms))) for _ in range(num_decode)]
        client = EngineClient(pairs=True, **settings)
        client.admit([engine.url for engine in prefill], prefill=True)
        client.admit([engine.url for engine in decode])
        try:
            yield Fleet([as_prefill(e) for e in prefill], [as_decode(e) for e in decode], client)
        finally:
            await client.close()


def as_prefill(engine: FakeEngine) -> FakePrefill:
    assert isinstance(engine, FakePrefill)
    return engine


def as_decode(engine: FakeEngine) -> FakeDecode:
    assert isinstance(engine, FakeDecode)
    return engine


async def until(holds: Any) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.005)


async def test_both_get_the_same_request_and_know_of_each_other() -> None:
    async with fleet() as it:
        answers = await asyncio.gather(*(it.client.generate([7, i], PARAMS) for i in range(9)))
        assert {a.tokens for a in answers} == {(10, 11, 12, 13, 14)}
        read, sampled = ({r["bootstrap_room"]: r for r in e.requests} for e in (it.prefill[0], it.decode[0]))
        assert read.keys() == sampled.keys() and len(read) == 9
        for room, request in read.items():
            other = sampled[room]
            assert request["rid"] != other["rid"] and request["input_ids"] == other["input_ids"]
            assert request["sampling_params"] == other["sampling_params"]
            assert (request["bootstrap_host"], request["bootstrap_port"]) == bootstrap_of(it.prefill[0].url)
        assert not it.prefill[0].aborted and not it.decode[0].aborted, "nothing was interrupted"


async def test_a_session_is_read_by_one_engine_and_sampled_where_there_is_room() -> None:
    async with fleet(3, 3) as it:
        for i in range(6):
            await it.client.generate([7, i], PARAMS, session_id="one")
        assert sorted(len(engine.requests) for engine in it.prefill) == [0, 0, 6]
        assert sorted(len(engine.requests) for engine in it.decode) == [2, 2, 2]


@pytest.mark.parametrize("fault", [503, 500, "drop"])
async def test_a_prompt_that_was_not_read_is_read_again(fault: Any) -> None:
    async with fleet() as it:
        it.prefill[0].faults.append(fault)
        assert len((await it.client.generate([7], PARAMS)).tokens) == 5
        assert len(it.prefill[0].requests) == 2
        await until(lambda: not it.running)


async def test_an_abort_of_the_reader_is_an_interruption() -> None:
    async with fleet() as it:
        it.prefill[0].reads = False
        task = asyncio.create_task(it.client.generate([7], PARAMS))
        await until(lambda: it.running == 2)
        it.prefill[0].reads = True
        for stop in it.prefill[0].running.values():
            stop.set()
        assert len((await task).tokens) == 5


async def test_a_refusal_of_the_reader_ends_the_call_and_what_waits_for_it() -> None:
    async with fleet() as it:
        it.prefill[0].faults.append(400)
        with pytest.raises(RequestRejected, match=f"{it.prefill[0].url}/generate refused"):
            await it.client.generate([7], PARAMS)
        it.prefill[0].faults.extend([500, 500])
        with pytest.raises(EngineError, match="HTTP 500"):
            await it.client.generate([7], PARAMS)
        await until(lambda: not it.running)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
async def test_the_end_of_either_engine_sends_a_request_to_another(kind: str) -> None:
    async with fleet(2, 2) as it:
        for engine in it.prefill:
            engine.reads = False
        tasks = [asyncio.create_task(it.client.generate([i], PARAMS)) for i in range(12)]
        await until(lambda: it.running == 24)
        engines: list[Any] = it.prefill if kind == "prefill" else it.decode
        it.client.dismiss([engines[0].url])
        await until(lambda: not engines[0].running and it.running == 24)
        for reader in it.prefill:
            reader.reads = True
            for stop in reader.running.values():
                stop.set()
        assert {len(a.tokens) for a in await asyncio.gather(*tasks)} == {5}


async def test_without_a_reader_a_request_waits_and_says_for_what() -> None:
    async with fleet(0, 1, engine_wait_s=0.2) as it:
        with pytest.raises(DeadlineExceeded, match="a prefill engine that can be reached"):
            await it.client.generate([7], PARAMS)
    async with fleet(1, 0, engine_wait_s=0.2) as it:
        with pytest.raises(DeadlineExceeded, match="a decode engine that can be reached"):
            await it.client.generate([7], PARAMS)


async def test_a_reader_that_joins_gets_who_waits() -> None:
    async with fleet(0, 1) as it:
        tasks = [asyncio.create_task(it.client.generate([i], PARAMS)) for i in range(5)]
        await asyncio.sleep(0.02)
        async with serve(FakePrefill(rooms=it.decode[0].rooms)) as late:
            it.client.admit([late.url], prefill=True)
            assert {len(a.tokens) for a in await asyncio.gather(*tasks)} == {5}


@pytest.mark.parametrize("reads", [True, False])
async def test_the_end_of_a_scope_reaches_both_and_ends_nothing_else(reads: bool) -> None:
    async with fleet() as it:
        it.decode[0].tick_s, it.prefill[0].reads = 0.01, reads
        other, scope = RequestScope(), RequestScope()
        REQUEST_SCOPE.set(other)
        others = [asyncio.create_task(it.client.generate([i], LONG)) for i in range(3)]
        REQUEST_SCOPE.set(scope)
        tasks = [asyncio.create_task(it.client.generate([50 + i], LONG, returns_partial=True)) for i in range(20)]
        each = 1 if reads else 2
        await until(lambda: it.running == 23 * each)
        await it.client.abort_scope(scope)
        assert {a.finish_reason for a in await asyncio.gather(*tasks)} == {"abort"}
        await until(lambda: it.running == 3 * each)
        assert not any(task.done() for task in others)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def test_a_pause_leaves_nothing_at_either_and_requests_go_on_after_it() -> None:
    async with fleet(2, 2) as it:
        for engine in it.decode:
            engine.tick_s = 0.01
        it.prefill[0].reads = False
        tasks = [asyncio.create_task(it.client.generate([i], {**PARAMS, "max_new_tokens": 60})) for i in range(16)]
        await until(lambda: it.running > 16)
        await it.client.pause()
        assert not it.client._pool.tries
        await until(lambda: not it.running)
        it.prefill[0].reads = True
        it.client.resume()
        assert {len(a.tokens) for a in await asyncio.gather(*tasks)} == {60}


async def test_a_call_that_is_cancelled_leaves_nothing_at_either() -> None:
    async with fleet() as it:
        it.prefill[0].reads = False
        task = asyncio.create_task(it.client.generate([7], PARAMS))
        await until(lambda: it.running == 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not it.running)
        assert not it.client._pool.tries and not it.client._pool._waiting


async def test_places_of_either_kind_are_as_many_as_there_are() -> None:
    async with fleet(1, 1, max_concurrency=3) as it:
        await asyncio.gather(*(it.client.generate([i], PARAMS) for i in range(20)))
        assert it.prefill[0].most_running <= 3 and it.decode[0].most_running <= 3
