"""The remote grader: what can succeed is tried again, what cannot is not, and batches share no fate."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from slime.core.errors import DataError, EngineError, RequestRejected
from slime.core.sample import Sample
from slime.rewards.graders.remote import RemoteReward
from slime.rewards.pool import GraderPool
from slime.rewards.scores import Scored, Unscored
from tests.support.loopback import served

Answer = Callable[[Any], tuple[int, Any]]


def serve(answer: Answer, work: Callable[[str, list[Any]], Awaitable[Any]]) -> Any:
    """Runs `work(url, requests seen)` beside a service whose `answer(body)` says (status, JSON); 0 drops the line."""
    seen: list[Any] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append(await request.json())
        status, body = answer(seen[-1])
        if status == 0:
            assert request.transport is not None
            request.transport.close()
        return web.json_response(body, status=status or 200)

    async def main() -> Any:
        app = web.Application()
        app.router.add_post("/rm", handle)
        async with served(app) as url:
            return await work(f"{url}/rm", seen)

    return asyncio.run(main())


@contextlib.asynccontextmanager
async def grader(**settings: Any) -> AsyncIterator[Callable[[Sample], Any]]:
    remote = RemoteReward(**settings)
    try:
        yield lambda sample: remote.grade(sample, 30.0)
    finally:
        if remote.batcher is not None:
            await remote.batcher.session.close()


@pytest.mark.parametrize("status", [0, 429, 500, 503])
def test_what_can_succeed_is_tried_again(status: int) -> None:
    answers = [(status, "no"), (200, {"reward": 0.25})]

    async def work(url: str, seen: list[Any]) -> None:
        sample = Sample(prompt="p", response="r", label="l", metadata={"a": 1})
        async with grader(rm_url=url) as grade:
            assert await grade(sample) == 0.25
        assert seen == [{"prompt": "p", "response": "r", "label": "l", "metadata": {"a": 1}}] * 2

    serve(lambda body: answers.pop(0), work)


@pytest.mark.parametrize("status", [307, 400, 401, 404, 408, 422])
def test_a_refusal_is_final(status: int) -> None:
    async def work(url: str, seen: list[Any]) -> None:
        async with grader(rm_url=url) as grade:
            with pytest.raises(EngineError, match=str(status)):
                await grade(Sample())
        assert len(seen) == 1

    serve(lambda body: (status, "no"), work)


def test_samples_that_wait_together_travel_together() -> None:
    async def work(url: str, seen: list[Any]) -> None:
        async with grader(rm_url=url, rm_batch_size=4) as grade:
            rewards = await asyncio.gather(*(grade(Sample(response="r" * i)) for i in range(10)))
        assert rewards == list(range(10)) and [len(batch) for batch in seen] == [4, 4, 2]

    serve(lambda batch: (200, [{"score": len(item["response"])} for item in batch]), work)


def test_one_refused_sample_costs_no_other_its_reward() -> None:
    def answer(batch: list[Any]) -> tuple[int, Any]:
        return (422, "bad") if any(i["response"] == "bad" for i in batch) else (200, [1.0] * len(batch))

    async def work(url: str, seen: list[Any]) -> None:
        texts = ["a", "bad", "b"]
        async with grader(rm_url=url, rm_batch_size=8) as grade:
            got = await asyncio.gather(*(grade(Sample(response=t)) for t in texts), return_exceptions=True)
        assert got[0] == got[2] == 1.0 and isinstance(got[1], RequestRejected)
        assert [len(batch) for batch in seen] == [3, 1, 1, 1]

    serve(answer, work)


def test_a_list_of_another_length_is_no_reward() -> None:
    async def work(url: str, seen: list[Any]) -> None:
        async with grader(rm_url=url, rm_batch_size=2) as grade:
            with pytest.raises(DataError, match="return a list"):
                await grade(Sample())

    serve(lambda batch: (200, [1.0] * 5), work)


def test_through_the_pool_a_dead_service_is_no_zero() -> None:
    async def scores(url: str, limit_s: float, *responses: str) -> list[Any]:
        settings = SimpleNamespace(rm_url=url, rm_batch_size=1)
        pool = GraderPool(num_workers=1, timeout_s=limit_s, rm_type="remote_rm", args=settings)
        try:
            return list(await asyncio.gather(*(pool.score(Sample(response=r)) for r in responses)))
        finally:
            await pool.close()

    async def work(url: str, seen: list[Any]) -> Any:
        return [*await scores(url, 60.0, "fine", "null"), *await scores(url, 4.0, "busy")]

    answers = {"fine": (200, 0.5), "null": (200, None), "busy": (503, "later")}
    fine, null, busy = serve(lambda body: answers[body["response"]], work)
    assert fine == Scored(0.5) and isinstance(null, Unscored) and busy == Unscored("timeout after 4 s")
