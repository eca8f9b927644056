"""Many requests of one scope or client are ended by one id on the real engine, and nobody else's are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from slime.rollout.client.call import Generation
from slime.rollout.client.engine_client import REQUEST_SCOPE, EngineClient, RequestScope
from slime.serving.server import SGLangServer
from tests.support.engine_state import num_running

PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": True, "max_new_tokens": 400}
NUM = 12


class Counting(EngineClient):
    """Notes the ids that it sends in aborts."""

    def __init__(self, *urls: str) -> None:
        super().__init__(*urls, request_timeout_s=300)
        self.sent, wire = list[str](), self._wire
        abort = wire._abort

        async def noted(url: str, rid: str) -> bool:
            self.sent.append(rid)
            return await abort(url, rid)

        wire._abort = noted  # type: ignore[method-assign]


def asked(client: EngineClient, first: int, scope: RequestScope) -> list[asyncio.Task[Generation]]:
    token = REQUEST_SCOPE.set(scope)
    try:
        return [asyncio.create_task(client.generate([2, first + i], PARAMS, returns_partial=True)) for i in range(NUM)]
    finally:
        REQUEST_SCOPE.reset(token)


async def until_running(url: str, num: int) -> None:
    while await asyncio.to_thread(num_running, url) != num:
        await asyncio.sleep(0.02)


@pytest.mark.slow
def test_one_id_ends_a_scope_and_no_request_of_others(front: SGLangServer) -> None:
    """Running ones and ones that wait for their turn; others of the same client, and those of another client."""

    async def work() -> None:
        client, neighbour = Counting(front.url), EngineClient(front.url, request_timeout_s=300)
        scope, other = RequestScope(), RequestScope()
        mine = asked(client, 10, scope)
        others = asked(client, 40, other) + asked(neighbour, 70, RequestScope())
        await until_running(front.url, 3 * NUM)
        await client.abort_scope(scope)
        ended = await asyncio.gather(*mine)
        assert [answer.finish_reason for answer in ended] == ["abort"] * NUM
        assert len(set(client.sent)) == 1 and len(client.sent) < NUM, client.sent
        for answer in await asyncio.gather(*others):
            assert answer.finish_reason == "length" and len(answer.tokens) == 400
        await until_running(front.url, 0)
        await client.close()
        await neighbour.close()

    asyncio.run(work())


@pytest.mark.slow
def test_what_a_dismissed_engine_has_of_its_client_ends_and_goes_on_there_when_it_is_admitted(
    front: SGLangServer,
) -> None:
    async def work() -> None:
        client, neighbour = Counting(front.url), EngineClient(front.url, request_timeout_s=300)
        mine, others = asked(client, 10, RequestScope()), asked(neighbour, 40, RequestScope())
        await until_running(front.url, 2 * NUM)
        client.dismiss([front.url])
        await client.drain()
        await until_running(front.url, NUM)
        client.admit([front.url])
        answers: list[Any] = await asyncio.gather(*mine, *others)
        assert {(answer.finish_reason, len(answer.tokens)) for answer in answers} == {("length", 400)}
        assert len(set(client.sent)) == 1 and len(client.sent) < NUM, client.sent
        await client.close()
        await neighbour.close()

    asyncio.run(work())
