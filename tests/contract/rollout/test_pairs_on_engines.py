"""Two real engines that answer together, one reading prompts and one sampling: the answer is that of one engine,
whatever befalls either of them meanwhile."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from slime.core.errors import TakenBack
from slime.core.text import EngineKeys
from slime.core.topology import ONE_RANK, Worker
from slime.rollout.client.call import Generation
from slime.rollout.client.engine_client import REQUEST_SCOPE, EngineClient, RequestScope
from slime.serving.control import HttpEngineControl
from slime.serving.payloads import digest
from slime.serving.router import Router
from slime.serving.server import SGLangServer
from slime.weights.receivers import Receiver
from slime.weights.sync import sync_weights
from slime.weights.transports.tensor import TensorTransport
from tests.support.engine_state import relabel
from tests.support.engines import READY_LIMIT_S, needs_pairs, send_to, serving_pair, signalled, spec_of
from tests.support.labelled_engine import TOLERANCE, labelled, log_prob, read_model
from tests.support.weights import Whole, transport_context

pytestmark = [pytest.mark.slow, needs_pairs, pytest.mark.timeout(600)]

KEY = "a-token-that-nobody-else-has"
GREEDY = {"temperature": 0.0, "ignore_eos": True}
LONG = {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": 400}
Pair = tuple[SGLangServer, SGLangServer]


@pytest.fixture(scope="module")
def pair(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Ready, with a token. Tests leave both as they find them, and relabel what they serve."""
    with serving_pair(tiny_model_path, tmp_path_factory.mktemp("pair"), api_key=KEY) as servers:
        yield servers


@asynccontextmanager
async def client_of(pair: Pair) -> AsyncIterator[EngineClient]:
    """A client of both, whose requests have ended at both when the block does."""
    prefill, decode = pair
    client = EngineClient(keys=EngineKeys(KEY), request_timeout_s=120, engine_wait_s=120, pairs=True)
    client.admit([prefill.url], prefill=True)
    client.admit([decode.url])
    try:
        yield client
    finally:
        await client.close()


def prompt(seed: int, num: int) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(10, 100) for _ in range(num)]


async def until(holds: Any) -> None:
    deadline = time.monotonic() + 60
    while not await holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def idle(*servers: SGLangServer) -> Any:
    """Whether nothing is left of any request: a cache is flushed when nobody uses it alone."""

    async def holds() -> bool:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}, timeout=30) as http:
            return all([(await http.post(f"{server.url}/flush_cache")).is_success for server in servers])

    return holds


async def test_a_pair_answers_what_one_engine_answers(pair: Pair, engine_server: SGLangServer) -> None:
    """Law: under greedy sampling ids and log-probs are those of one engine; also of a prompt that is in the cache in
    part, of one token, and where a stop string ends it."""
    for server, key in ((engine_server, None), *((server, KEY) for server in pair)):
        relabel(server.url, 1, key)
    asked = [(prompt(i // 2, 20 + 90 * (i % 2)), {**GREEDY, "max_new_tokens": 24}) for i in range(6)]
    asked += [(prompt(9, 30), {**GREEDY, "max_new_tokens": 1})]
    alone = EngineClient(engine_server.url)
    one = [await alone.generate(ids, params) for ids, params in asked]
    asked.append((asked[0][0], {**GREEDY, "max_new_tokens": 24, "stop": one[0].text[8:10], "no_stop_trim": True}))
    one.append(await alone.generate(*asked[-1]))
    await alone.close()
    async with client_of(pair) as client:
        two = [await client.generate(ids, params) for ids, params in asked]
        together = await asyncio.gather(*(client.generate(ids, params) for ids, params in asked))
    for want, *got in zip(one, two, together, strict=True):
        for answer in got:
            assert (answer.tokens, answer.finish_reason) == (want.tokens, want.finish_reason)
            assert max(abs(a - b) for a, b in zip(answer.log_probs, want.log_probs, strict=True)) < 1e-4
            assert answer.weight_version == 1 and answer.text == want.text
    assert one[-1].finish_reason == "stop" and len(one[-1].tokens) < 24
    await until(idle(*pair))


async def test_the_end_of_a_scope_ends_its_requests_at_both(pair: Pair) -> None:
    for server in pair:
        relabel(server.url, 1, KEY)
    async with client_of(pair) as client:
        scope = RequestScope()
        token = REQUEST_SCOPE.set(scope)
        tasks = [asyncio.create_task(client.generate(prompt(i, 40), LONG)) for i in range(24)]
        REQUEST_SCOPE.reset(token)
        await until_streaming(client, pair[1], least=4)
        await client.abort_scope(scope)
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert any(isinstance(answer, TakenBack) for answer in answers)
        await until(idle(*pair))
        assert len((await client.generate(prompt(0, 10), {**LONG, "max_new_tokens": 3})).tokens) == 3


async def until_streaming(client: EngineClient, decode: SGLangServer, *, least: int) -> None:
    """Returns when so many requests have got tokens."""

    async def holds() -> bool:
        tries = [one for up in client._pool.upstreams if up.url == decode.url for one in up.tries]
        return sum(one.has_tokens for one in tries) >= least

    await until(holds)


async def test_weights_change_under_requests_that_go_on(pair: Pair, tiny_model_path: Path) -> None:
    """Law 2: both engines hold what the trainer sent before either serves again, and each token tells that it was
    sampled with the weights whose version it has."""
    table, state = read_model(tiny_model_path)
    controls = [HttpEngineControl(server.url, ONE_RANK, timeout_s=120, api_key=KEY) for server in pair]
    channel = TensorTransport().open(transport_context(table=table))

    def sync(weights: dict[str, Any], version: int) -> None:
        sync_weights(
            Whole(table, weights.items()),
            receivers=[Receiver(control) for control in controls],
            channel=channel,
            digest=digest,
            version=version,
            buffer_bytes=2**20,
        )

    try:
        await asyncio.to_thread(sync, labelled(state, 1), 1)
        async with client_of(pair) as client:
            tasks = [asyncio.create_task(client.generate(prompt(i, 30), LONG)) for i in range(12)]
            await until_streaming(client, pair[1], least=8)
            await client.pause()
            await asyncio.to_thread(sync, labelled(state, 2), 2)
            client.resume()
            await until_streaming(client, pair[1], least=8)
            await asyncio.to_thread(sync, labelled(state, 3), 3)  # nobody told the requests
            answers = await asyncio.gather(*tasks)
        assert {v for answer in answers for v in versions_of(answer)} == {1, 2, 3}
        for answer in answers:
            assert len(answer.tokens) == LONG["max_new_tokens"] and answer.finish_reason == "length"
            for token, said, version in zip(answer.tokens, answer.log_probs, versions_of(answer), strict=True):
                assert abs(said - log_prob(token, version)) < TOLERANCE
    finally:
        await asyncio.to_thread(sync, state, 1)
        channel.close()
        for control in controls:
            control.close()


def versions_of(answer: Generation) -> tuple[int, ...]:
    """[T] the version of each token."""
    said = answer.weight_version
    return (said,) * len(answer.tokens) if isinstance(said, int) else said


async def test_requests_outlive_the_engine_that_reads_for_them(
    pair: Pair, tiny_model_path: Path, engine_server: SGLangServer, tmp_path: Path
) -> None:
    """Law: the end of a reading engine costs no request; those that it had not read are read by another one."""
    victim = SGLangServer(
        spec_of(tiny_model_path, worker=Worker.PREFILL, api_key=KEY), log_path=tmp_path / "victim.log"
    )
    asked = [(prompt(i, 400), {**GREEDY, "max_new_tokens": 40}) for i in range(32)]
    for server, key in ((engine_server, None), *((server, KEY) for server in pair)):
        relabel(server.url, 1, key)
    alone = EngineClient(engine_server.url)
    want = await asyncio.gather(*(alone.generate(ids, params) for ids, params in asked))
    await alone.close()
    try:
        victim.start()
        await asyncio.to_thread(victim.wait_ready, READY_LIMIT_S)
        async with client_of((victim, pair[1])) as client:
            tasks = [asyncio.create_task(client.generate(ids, params)) for ids, params in asked[:16]]
            await until_streaming(client, pair[1], least=1)
            signalled(victim, signal.SIGSTOP)
            tasks += [asyncio.create_task(client.generate(ids, params)) for ids, params in asked[16:]]
            (reading,) = (upstream for upstream in client._pool.upstreams if upstream.url == victim.url)

            async def has_all() -> bool:
                return len(reading.tries) >= 16

            await until(has_all)
            signalled(victim, signal.SIGKILL)
            client.dismiss([victim.url])
            client.admit([pair[0].url], prefill=True)
            got = await asyncio.gather(*tasks)
    finally:
        victim.stop()
    assert [(g.tokens, g.finish_reason) for g in got] == [(w.tokens, w.finish_reason) for w in want]
    await until(idle(*pair))


def test_the_router_sends_a_request_to_both(pair: Pair, tmp_path: Path) -> None:
    """Law: who speaks HTTP to the model's router is answered by a pair as well."""
    for server in pair:
        relabel(server.url, 1, KEY)
    front = Router(log_path=tmp_path / "router.log", worker_api_key=KEY, pairs=True)
    try:
        front.start()
        front.wait_ready()
        for server, kind in zip(pair, (Worker.PREFILL, Worker.DECODE), strict=True):
            send_to(front, server.url, kind)
        with httpx.Client(headers={"Authorization": f"Bearer {KEY}"}, timeout=60, trust_env=False) as http:
            body = {"input_ids": prompt(0, 10), "sampling_params": {**GREEDY, "max_new_tokens": 8}}
            answer = http.post(f"{front.url}/generate", json=body).raise_for_status().json()
            assert len(answer["output_ids"]) == 8
            chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            answer = http.post(f"{front.url}/v1/chat/completions", json=chat).raise_for_status().json()
            assert answer["usage"]["completion_tokens"] > 0
    finally:
        front.stop()
