"""The engine client: what is retried, what is refused, what an abandoned request leaves behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from slime.core.errors import DeadlineExceeded, EngineError, RequestRejected
from slime.core.sample import Sample
from slime.rollout.client.call import Generation, before_stop, parse_generation
from slime.rollout.client.engine_client import REQUEST_SCOPE, EngineClient, RequestScope
from tests.support.fake_engine import FakeEngine, serve

PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 8}


def ask(engine: FakeEngine, **settings: Any) -> Any:
    """One request against a served fake; returns (generation or exception, engine)."""

    async def main() -> Any:
        async with serve(engine):
            client = EngineClient(engine.url, **settings)
            try:
                return await client.generate([5, 6], PARAMS)
            except Exception as problem:
                return problem
            finally:
                await client.close()

    return asyncio.run(main())


def test_ids_log_probs_and_version_come_back_and_the_end_token_is_trained() -> None:
    generation = ask(FakeEngine(stop_after=3, weight_version="7"))
    assert generation.tokens == (10, 11, 12, 1)
    assert len(generation.log_probs) == 4 and generation.weight_version == 7
    assert generation.finish_reason == "stop" and generation.text == "ABC"


@pytest.mark.parametrize("fault", [503, 429, 502, "drop", 500])
def test_what_can_succeed_is_tried_again(fault: Any) -> None:
    engine = FakeEngine()
    engine.faults.extend([fault])
    assert ask(engine).finish_reason == "length"
    assert len(engine.requests) == 2


@pytest.mark.parametrize(("fault", "aborts"), [("drop", 1), (502, 1), (503, 0)])
def test_a_second_try_has_its_own_id_and_the_first_is_aborted(fault: Any, aborts: int) -> None:
    engine = FakeEngine()
    engine.faults.extend([fault])
    ask(engine)
    first, second = (request["rid"] for request in engine.requests)
    assert first != second and engine.aborted == [first] * aborts


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_refusal_is_never_retried(status: int) -> None:
    engine = FakeEngine()
    engine.faults.extend([status])
    problem = ask(engine)
    assert isinstance(problem, RequestRejected) and "as told" in str(problem)
    assert len(engine.requests) == 1


def test_retries_are_bounded() -> None:
    engine = FakeEngine()
    engine.faults.extend([500] * 99)
    assert isinstance(ask(engine), EngineError)
    assert len(engine.requests) == 2  # an internal error is tried once more, no oftener


def test_a_dead_server_is_an_error_within_seconds() -> None:
    async def main() -> None:
        client = EngineClient("http://127.0.0.1:9", engine_wait_s=1)
        with pytest.raises(DeadlineExceeded, match=r"an engine that can be reached .* http://127.0.0.1:9"):
            await client.generate([5], PARAMS)
        await client.close()

    started = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - started < 10


def test_an_expired_request_is_aborted_in_the_engine() -> None:
    engine = FakeEngine()
    engine.faults.append("hang")
    problem = ask(engine, request_timeout_s=0.2)
    assert isinstance(problem, DeadlineExceeded)
    assert engine.aborted == [engine.requests[0]["rid"]]


@pytest.mark.parametrize("num_silent", [1, 3])
def test_requests_of_an_engine_that_brings_no_tokens_go_on_once_at_another_one(num_silent: int) -> None:
    """Law: the engine is named until it brings one; requests that two engines brought none end."""
    engines = silent, other, third = FakeEngine(), FakeEngine(), FakeEngine()
    for engine in engines[:num_silent]:
        engine.faults.extend(["hang"] * 4)

    async def main() -> None:
        async with serve(silent), serve(other), serve(third):
            client = EngineClient(silent.url, request_timeout_s=1.0)
            both = [asyncio.create_task(client.generate([5, 6], PARAMS)) for _ in range(2)]
            while len(silent.requests) < 2:
                await asyncio.sleep(0.01)
            client.admit([other.url, third.url])
            if num_silent == 1:
                assert [one.finish_reason for one in await asyncio.gather(*both)] == ["length"] * 2
                assert client.stalled() == [silent.url] and client.stalled(within_s=-1.0) == []
                silent.faults.clear()
                client.dismiss([other.url, third.url])
                await client.generate([5, 6], PARAMS)
                assert client.stalled() == [], "it brings tokens again"
            else:
                ends = await asyncio.gather(*both, return_exceptions=True)
                assert all(isinstance(end, DeadlineExceeded) for end in ends)
            assert sum(len(engine.requests) for engine in engines) == (5 if num_silent == 1 else 4)
            await client.close()

    asyncio.run(main())


def test_requests_of_the_only_engine_wait_for_it_to_be_started_again() -> None:
    """Law: its stall costs no request: given up and admitted again, it gets what it had."""

    async def main() -> None:
        silent, again = FakeEngine(), FakeEngine()
        silent.faults.extend(["hang"] * 4)
        async with serve(silent), serve(again):
            client = EngineClient(silent.url, request_timeout_s=1.0)
            both = [asyncio.create_task(client.generate([5, 6], PARAMS)) for _ in range(2)]
            while not client.stalled():
                await asyncio.sleep(0.01)
            client.dismiss([silent.url])
            await asyncio.sleep(0.1)
            client.admit([again.url])
            assert [one.finish_reason for one in await asyncio.gather(*both)] == ["length"] * 2
            assert len(again.requests) == 2
            await client.close()

    asyncio.run(main())


def test_a_cancelled_request_is_aborted_in_the_engine() -> None:
    async def main(engine: FakeEngine) -> None:
        async with serve(engine):
            client = EngineClient(engine.url)
            task = asyncio.create_task(client.generate([5], {**PARAMS, "max_new_tokens": 100_000}))
            while not engine.running:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await client.drain()
            assert engine.aborted == [engine.requests[0]["rid"]]
            await client.close()

    asyncio.run(main(FakeEngine(tick_s=0.01)))


def test_aborting_a_scope_returns_partial_tokens_and_sends_no_more() -> None:
    async def main(engine: FakeEngine) -> None:
        async with serve(engine):
            client = EngineClient(engine.url, max_concurrency=2)
            scope = RequestScope()
            REQUEST_SCOPE.set(scope)
            long = {**PARAMS, "max_new_tokens": 100_000}
            tasks = [asyncio.create_task(client.generate([5], long, returns_partial=True)) for _ in range(4)]
            while len(engine.running) < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            await client.abort_scope(scope)
            results = await asyncio.gather(*tasks)
            assert [r.finish_reason for r in results] == ["abort"] * 4
            assert sorted(len(r.tokens) > 0 for r in results) == [False, False, True, True]
            assert len(engine.requests) == 2 and engine.most_running == 2
            await client.close()

    asyncio.run(main(FakeEngine(tick_s=0.01)))


def test_paused_requests_return_partial_tokens_and_later_ones_wait_until_they_resume() -> None:
    """Law: when `pause` returns no request of the scope runs, and none starts before `resume`."""

    async def main(engine: FakeEngine) -> None:
        async with serve(engine):
            client = EngineClient(engine.url)
            scope = RequestScope()
            REQUEST_SCOPE.set(scope)
            long = {**PARAMS, "max_new_tokens": 100_000}
            tasks = [asyncio.create_task(client.generate([5], long, returns_partial=True)) for _ in range(4)]
            while len(engine.running) < 4:
                await asyncio.sleep(0.01)
            await client.pause(scope)
            assert not engine.running and not scope.aborted, f"{len(engine.running)} requests still run"
            results = await asyncio.gather(*tasks)
            assert [r.finish_reason for r in results] == ["abort"] * 4 and all(r.tokens for r in results)
            later = asyncio.create_task(client.generate([5], PARAMS))
            await asyncio.sleep(0.05)
            assert len(engine.requests) == 4, "a request was sent while requests were paused"
            client.resume()
            assert (await later).finish_reason == "length"
            await client.close()

    asyncio.run(main(FakeEngine(tick_s=0.01)))


@pytest.mark.parametrize(
    ("ids", "params", "message"),
    [
        ([], {}, "prompt is empty"),
        ([3, 200], {}, "tokenizer matches the model"),
        ([3], {"logit_bias": {"3": 1.0}}, "silently drop them"),
    ],
)
def test_what_an_engine_mishandles_is_refused_before_it_is_sent(ids: list[int], params: Any, message: str) -> None:
    async def main() -> None:
        with pytest.raises(RequestRejected, match=message):
            await EngineClient("http://127.0.0.1:9", vocab_size=128).generate(ids, {**PARAMS, **params})

    asyncio.run(main())


def answer(**meta: Any) -> dict[str, Any]:
    base = {
        "finish_reason": {"type": "stop", "matched": 1},
        "weight_version": "3",
        "output_token_logprobs": [[-1.0, 4, None]],
    }
    return {"text": "x", "output_ids": [4], "meta_info": {**base, **meta}}


@pytest.mark.parametrize(
    "bad",
    [
        {"weight_version": "default"},
        {"weight_version": None},
        {"output_token_logprobs": None},
        {"output_token_logprobs": [[None, 4, None]]},
        {"output_token_logprobs": [[float("nan"), 4, None]]},
        {"output_token_logprobs": [[-1.0, 5, None]]},
        {"finish_reason": {"type": "magic"}},
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_an_error(bad: dict[str, Any]) -> None:
    with pytest.raises(EngineError):
        parse_generation(answer(**bad))


def test_a_matched_stop_string_stays_in_the_text() -> None:
    assert parse_generation(answer(finish_reason={"type": "stop", "matched": "</a>"})).text == "x</a>"
    assert parse_generation(answer()).text == "x"


LABELLED = {"output_token_logprobs": [[-1.0, 4, None], [-1.0, 5, None]]}


def test_an_engine_that_labels_tokens_is_taken_at_its_word() -> None:
    meta = {**LABELLED, "weight_version": "9", "token_weight_version": [7, 8]}
    whole = {**answer(**meta), "output_ids": [4, 5]}
    assert parse_generation(whole, token_versions=True).weight_version == (7, 8)
    assert parse_generation(whole).weight_version == 9
    sample = Sample(tokens=[1])
    sample.append_response_tokens([4, 5], log_probs=[-1.0, -1.0], weight_version=(7, 8))
    assert sample.token_versions == [7, 8] and sample.weight_versions == [7, 8]


@pytest.mark.parametrize("labels", [None, [], [3], [-1, 3], [0, 0], [3, 4], [3, 3, 3]])
def test_a_token_without_its_label_is_an_error(labels: list[int] | None) -> None:
    whole = {**answer(**LABELLED, token_weight_version=labels), "output_ids": [4, 5]}
    with pytest.raises(EngineError, match="a valid one per token"):
        parse_generation(whole, token_versions=True)


def test_what_an_abort_leaves_without_labels_is_dropped() -> None:
    whole = {**answer(**LABELLED, finish_reason={"type": "abort"}), "output_ids": [4, 5]}
    generation = parse_generation(whole, token_versions=True)
    assert generation.tokens == () and generation.finish_reason == "abort"


class Letters:
    """Each id is a character."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


@pytest.mark.parametrize(
    ("text", "stop", "left"),
    [
        ("so </to", ["</tool>"], "so "),
        ("so </to", "</tool>", "so "),
        ("a\n", ["\n\n", "END"], "a"),
        ("<", ["<"], "<"),
        ("so", ["</tool>"], "so"),
        ("", ["x"], ""),
    ],
)
def test_an_interrupted_part_ends_before_what_may_begin_a_stop_string(text: str, stop: Any, left: str) -> None:
    ids = tuple(map(ord, text))
    part = Generation(ids, (-0.5,) * len(ids), "abort", tuple(range(len(ids))), text)
    got = before_stop(part, stop, Letters())
    assert Letters().decode(got.tokens) == got.text == left
    assert len(got.log_probs) == len(got.weight_version) == len(left)
    assert replace(part, weight_version=3) == before_stop(replace(part, weight_version=3), ["zzz"], Letters())
