"""Streams: the parts are the whole, an early end reaches the engine, and only the first part is asked for again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest

from slime.core.errors import DeadlineExceeded, EngineError, RequestRejected, TakenBack
from slime.rollout.client.engine_client import REQUEST_SCOPE, STREAM_INTERVAL, WHOLE, EngineClient, RequestScope
from tests.support.fake_engine import FakeEngine, serve

PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 8}


def with_client(engine: FakeEngine, work: Callable[[EngineClient], Awaitable[Any]], **settings: Any) -> Any:
    """Runs `work` on a client of the served fake."""

    async def main() -> Any:
        async with serve(engine):
            client = EngineClient(engine.url, **settings)
            try:
                return await work(client)
            finally:
                await client.close()

    return asyncio.run(main())


async def all_parts(client: EngineClient) -> list[Any]:
    return [part async for part in client.stream([5, 6], PARAMS)]


@pytest.mark.parametrize("faults", [[], [503], ["drop", 502]])
def test_the_parts_are_the_whole_also_after_another_try(faults: list[Any]) -> None:
    engine = FakeEngine(stop_after=3)
    engine.faults.extend(faults)
    parts = with_client(engine, all_parts)
    whole = with_client(FakeEngine(stop_after=3), lambda client: client.generate([5, 6], PARAMS))
    assert tuple(t for p in parts for t in p.tokens) == whole.tokens
    assert tuple(x for p in parts for x in p.log_probs) == whole.log_probs
    assert "".join(p.text for p in parts) == whole.text
    assert [p.finish_reason for p in parts] == ["abort"] * 3 + ["stop"]
    assert len(engine.requests) == len(faults) + 1 and engine.requests[-1]["rid"] not in engine.aborted


def test_leaving_the_loop_aborts_the_request_and_frees_its_slot() -> None:
    engine, scope = FakeEngine(tick_s=0.001), RequestScope()

    async def work(client: EngineClient) -> None:
        REQUEST_SCOPE.set(scope)
        for _ in range(2):
            async with aclosing(client.stream([5, 6], PARAMS)) as parts:
                async for part in parts:
                    assert [one.rid for one in scope.tries] == [engine.requests[-1]["rid"]] and len(part.tokens) == 1
                    break
        await client.drain()

    with_client(engine, work, max_concurrency=1)
    assert engine.aborted == [request["rid"] for request in engine.requests] and not scope.tries


def test_a_broken_stream_goes_on_behind_what_it_has_handed_out() -> None:
    engine = FakeEngine()
    engine.faults.append("cut")
    parts = with_client(engine, all_parts)
    first, second = engine.requests
    assert second["input_ids"] == [*first["input_ids"], 10, 11] and second["sampling_params"]["max_new_tokens"] == 6
    assert sum(len(p.tokens) for p in parts) == 8 and [p.finish_reason for p in parts] == ["abort"] * 7 + ["length"]


@pytest.mark.parametrize(("interval", "num_chunks"), [(WHOLE, 1), (8, 8)])
@pytest.mark.parametrize("fault", [None, "cut", "error"])
def test_longer_chunks_lose_nothing_of_what_arrives_together(interval: int, num_chunks: int, fault: str | None) -> None:
    """Law: a reader that is slower than the engine gets fewer chunks, with the same tokens in the same order."""
    many = {**PARAMS, "max_new_tokens": 200}
    engine = FakeEngine()
    engine.faults.append(fault)

    async def read(client: EngineClient) -> list[Any]:
        parts = []
        async for part in client.stream([5, 6], many, interval=interval):
            parts.append(part)
            await asyncio.sleep(0.01)
        return parts

    parts = with_client(engine, read)
    first = 1 + (interval or STREAM_INTERVAL) if fault else 200
    ids = [10 + i % 50 for n in (first, 200 - first) for i in range(n)]
    assert [t for p in parts for t in p.tokens] == ids and len([x for p in parts for x in p.log_probs]) == 200
    assert [request["input_ids"] for request in engine.requests[1:]] == ([[5, 6, *ids[:first]]] if fault else [])
    assert [p.finish_reason for p in parts] == ["abort"] * (len(parts) - 1) + ["length"]
    assert 1 <= len(parts) <= num_chunks, "25 events arrive while the first one is read"


def test_a_broken_stream_that_its_grammar_forbids_to_continue_is_an_error() -> None:
    engine = FakeEngine()
    engine.faults.append("cut")

    async def work(client: EngineClient) -> Any:
        return [part async for part in client.stream([5, 6], {**PARAMS, "regex": "A*"})]

    with pytest.raises(EngineError, match="cannot be continued"):
        with_client(engine, work)
    engine.faults.append("cut")
    many = {**PARAMS, "max_new_tokens": 80, "regex": "A*"}
    whole = with_client(engine, lambda client: client.generate([5, 6], many))
    assert len(whole.tokens) == 80 and len(engine.requests) == 3
    assert engine.requests[-1]["input_ids"] == [5, 6], "it starts over"


@pytest.mark.parametrize(("fault", "error"), [(400, RequestRejected), ("hang", DeadlineExceeded)])
def test_errors_are_those_of_a_request(fault: Any, error: type[Exception]) -> None:
    engine = FakeEngine()
    engine.faults.append(fault)
    with pytest.raises(error):
        with_client(engine, all_parts, request_timeout_s=0.3)
    assert len(engine.requests) == 1


def test_a_scope_that_was_aborted_sends_nothing() -> None:
    engine = FakeEngine()

    async def work(client: EngineClient) -> Any:
        REQUEST_SCOPE.set(RequestScope(aborted=True))
        with pytest.raises(TakenBack):
            await all_parts(client)
        return [part async for part in client.stream([3], PARAMS, returns_partial=True)]

    (part,) = with_client(engine, work)
    assert part.finish_reason == "abort" and not part.tokens and not engine.requests
