"""A request that survives: whatever interrupts it, the joined answer is that of one request that nothing interrupted.

The engine of these tests is deterministic: the id and the log-prob of a token follow from all ids before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slime.core.errors import DeadlineExceeded, DeadlyRequest, EngineError, TakenBack
from slime.core.routed_experts import ExpertFormat
from slime.rollout.client.call import Call, EndOfText, Generation
from slime.rollout.client.engine_client import REQUEST_SCOPE, EngineClient, RequestScope
from slime.rollout.client.retries import MAX_DEATHS
from slime.rollout.transcript import TRANSCRIPT, Transcript
from tests.support.fake_engine import FakeEngine, serve
from tests.support.marks import quick

LETTERS = 26
END = EndOfText(
    frozenset([0]), lambda ids, skip: "".join("" if skip and i == 0 else chr(97 + i % LETTERS) for i in ids)
)
EOS = 0


def sampled(ids: Sequence[int]) -> tuple[int, float]:
    """The id that follows on `ids`, and its log-prob; an end token now and then."""
    digest = hashlib.blake2b(bytes(i % 256 for i in ids), digest_size=4).digest()
    return (EOS if digest[0] < 2 else 1 + digest[1] % 25), -digest[2] / 100 - 0.01


def uninterrupted(prompt: Sequence[int], most: int, stop: str | None = None) -> tuple[list[int], list[float], str]:
    """Ids, log-probs and finish reason of one request, by the order in which an engine looks for its end."""
    ids, log_probs = list(prompt), list[float]()
    while True:
        token, log_prob = sampled(ids)
        ids.append(token)
        log_probs.append(log_prob)
        made = ids[len(prompt) :]
        if len(made) >= most:
            return made, log_probs, "length"
        if token == EOS or (stop and stop in END.decode(made, False)):  # type: ignore[misc]
            return made, log_probs, "stop"


def events(call: Call, version: int, cut_after: int | None, size: int, abort: bool) -> list[dict[str, Any]]:
    """What an engine sends for the next request of a call: cut off after some tokens, or to its end."""
    payload = call.payload("r", size)
    prompt, params = payload["input_ids"], payload["sampling_params"]
    stop = (params.get("stop") or [None])[0]
    made, log_probs, reason = uninterrupted(prompt, params["max_new_tokens"], stop)
    cut = cut_after is not None and cut_after < len(made)
    made, finish = (made[:cut_after], {"type": "abort"}) if cut else (made, {"type": reason})
    out = []
    for begin in range(0, max(len(made), 1), size):
        new = made[begin : begin + size]
        last = begin + size >= len(made)
        meta = {
            "finish_reason": finish if last and (abort or not cut) else None,
            "weight_version": str(version),
            "prompt_tokens": len(prompt),
            "output_token_logprobs": [[p, t, None] for p, t in zip(log_probs[begin:], new, strict=False)],
        }
        out.append({"text": END.decode(new, True), "output_ids": new, "meta_info": meta})  # type: ignore[misc]
    return out


@settings(max_examples=6 * settings().max_examples)
@example(seed=163, most=9, cuts=[(4, False)], size=1, stop="q")  # the last allowed token completes the stop string
@given(
    seed=st.integers(0, 2**16),
    most=st.integers(1, 60),
    cuts=st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=8),
    size=st.integers(1, 9),
    stop=st.sampled_from([None, "ab", "q", "xyz", "aa"]),
)
def test_joined_parts_are_one_request(
    seed: int, most: int, cuts: list[tuple[int, bool]], size: int, stop: str | None
) -> None:
    """Law: ids, log-probs and finish reason are those of one request; each id has the version that sampled it."""
    rng = random.Random(seed)
    prompt = [rng.randrange(256) for _ in range(rng.randint(1, 5))]
    params = {"max_new_tokens": most, **({"stop": [stop]} if stop else {})}
    call, versions = Call(prompt, params, end=END), list[int]()
    for version, (cut_after, abort) in enumerate([*cuts, (10**9, True)], start=1):
        for event in events(call, version, cut_after, size, abort):
            part, ended = call.take_event(event)
            versions += [version] * len(part.tokens)
            if ended:
                break
        if call.finish is None:
            call.settle()
        if call.finish is not None:
            break
    got = call.answer()
    assert (list(got.tokens), list(got.log_probs), got.finish_reason) == uninterrupted(prompt, most, stop)
    labels = got.weight_version
    assert ([labels] * len(got.tokens) if isinstance(labels, int) else list(labels)) == versions
    body = got.tokens[:-1] if got.finish_reason == "stop" and got.tokens[-1] == EOS else got.tokens
    assert got.text == END.decode(body, True)  # type: ignore[misc]


def test_an_engine_that_repeats_what_it_has_sent_is_not_believed_twice() -> None:
    """SGLang repeats all of a request that is aborted while it waits for its turn."""
    call = Call([5], {"max_new_tokens": 9})
    call.payload("r", 1)
    pairs = [[-0.1, 7, None], [-0.2, 8, None]]
    meta = {"finish_reason": None, "weight_version": "3", "prompt_tokens": 1}
    call.take_event({"text": "ab", "output_ids": [7, 8], "meta_info": {**meta, "output_token_logprobs": pairs}})
    waiting = {"finish_reason": {"type": "abort"}, "weight_version": "4", "completion_tokens": 2}
    event = {"text": "ab", "output_ids": [8], "meta_info": {**waiting, "output_token_logprobs": pairs}}
    part, ended = call.take_event(event)
    assert ended and call.finish is None and not part.tokens and call.tokens == [7, 8]
    assert call.answer().weight_version == 3 and call.answer().text == "ab"


def test_what_is_left_is_asked_for() -> None:
    call = Call([5, 6], {"max_new_tokens": 9, "min_new_tokens": 4, "sampling_seed": 3})
    first = call.payload("a", 1)["sampling_params"]
    pairs = [[-0.1, 7 + i, None] for i in range(6)]
    meta = {"weight_version": "3", "prompt_tokens": 2, "output_token_logprobs": pairs, "finish_reason": None}
    call.take_event({"text": "x", "meta_info": meta})
    second = call.payload("b", 1)
    assert first["max_new_tokens"] == 9 and second["sampling_params"]["max_new_tokens"] == 3
    assert first["min_new_tokens"] == 4 and second["sampling_params"]["min_new_tokens"] == 0
    assert (
        second["input_ids"].tolist() == [5, 6, 7, 8, 9, 10, 11, 12] and second["sampling_params"]["sampling_seed"] == 3
    )


def test_routed_experts_join_without_gap() -> None:
    call = Call([5, 6, 7], {"max_new_tokens": 4}, experts=ExpertFormat(200, 2, (True,)), experts_from=1)
    engine = FakeEngine()

    async def answer(rid_and: dict[str, Any], reason: str, num: int) -> dict[str, Any]:
        body = {**rid_and, "sampling_params": {**rid_and["sampling_params"], "max_new_tokens": num}}
        whole = await engine._sample(body, asyncio.Event())
        whole["meta_info"]["finish_reason"] = {"type": reason}
        return whole

    call.take_event(asyncio.run(answer(call.payload("a", 1), "abort", 2)))
    second = call.payload("b", 1)
    assert second["rid"].endswith("4"), "rows up to the last token but one are known"
    call.take_event(asyncio.run(answer(second, "length", 2)))
    made = call.answer()
    assert made.routed_experts is not None and made.routed_experts.start == 1
    read = [*[5, 6, 7], *made.tokens][1:-1]
    assert [int(i) for i in made.routed_experts.ids[:, 0, 0]] == [i % 100 for i in read]


@dataclass
class Deterministic(FakeEngine):
    """Samples as `sampled` does."""

    def token(self, body: dict[str, Any], i: int) -> int:
        return sampled(self._ids(body)[: len(body["input_ids"]) + i])[0]

    def log_prob(self, body: dict[str, Any], i: int) -> float:
        return sampled(self._ids(body)[: len(body["input_ids"]) + i])[1]

    def _ids(self, body: dict[str, Any]) -> list[int]:
        return [*body["input_ids"], *self._sampled.get(body["rid"], [])]

    def is_end(self, token: int) -> bool:
        return token == EOS

    def text(self, ids: list[int]) -> str:
        return END.decode(ids, True)  # type: ignore[misc]


PARAMS = {"temperature": 1.0, "max_new_tokens": 40}


async def settled(client: EngineClient, prompts: list[list[int]], trouble: Any) -> list[Generation]:
    """The answers to these prompts, while `trouble` goes on."""
    tasks = [
        asyncio.create_task(client.generate(prompt, PARAMS, session_id=f"s{i}")) for i, prompt in enumerate(prompts)
    ]
    troubling = asyncio.create_task(trouble)
    try:
        return await asyncio.gather(*tasks)
    finally:
        troubling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await troubling


def check(prompts: list[list[int]], answers: list[Generation]) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        ids, log_probs, reason = uninterrupted(prompt, PARAMS["max_new_tokens"])  # type: ignore[arg-type]
        assert (list(answer.tokens), list(answer.log_probs), answer.finish_reason) == (ids, log_probs, reason)


@pytest.mark.parametrize("seed", quick(range(4), 0))
async def test_requests_survive_engines_that_come_and_go(seed: int) -> None:
    """Law: with engines killed, dismissed, admitted, failing and paused, each answer is as if nothing had been."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(1, 256) for _ in range(4)] for _ in range(24)]
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(serve(Deterministic(tick_s=0.004))) for _ in range(3)]
        client = EngineClient(*(e.url for e in engines), end=END, max_concurrency=16)

        spare = [503, 502, None, None]  # fewer than a request may fail of in a row, whatever the order

        async def trouble() -> None:
            while True:
                await asyncio.sleep(rng.random() / 20)
                engine = rng.choice(engines)
                match rng.randrange(5):
                    case 0:
                        client.dismiss([engine.url])
                        await asyncio.sleep(0.02)
                        client.admit([engine.url])
                    case 1 | 2 if spare:
                        if (status := spare.pop()) is not None:
                            engine.faults.append(status)
                        else:
                            for transport in list(engine.transports.values()):
                                transport.close()
                    case 3:
                        await client.pause()
                        await asyncio.sleep(0.01)
                        client.resume()
                    case _:
                        for stop in engine.running.values():
                            stop.set()

        check(prompts, await settled(client, prompts, trouble()))
        assert sum(len(e.requests) for e in engines) > len(prompts), "nothing was interrupted"
        await client.close()


@dataclass
class Mortal(Deterministic):
    """Dies of requests that begin with `DEADLY`, and is there again at once."""

    dies_at: int = 0
    """Tokens behind the request."""
    deaths: int = 0
    dies: Callable[[], None] = lambda: None

    def token(self, body: dict[str, Any], i: int) -> int:
        if body["input_ids"][0] == DEADLY and i == self.dies_at and body["rid"] in self.running:
            self.deaths += 1
            self.dies()
        return super().token(body, i)


DEADLY = 251


@pytest.mark.parametrize("kills", quick(["connections", "hangs"], "connections"))
@pytest.mark.parametrize("dies_at", quick([0, 9], 9))
async def test_a_request_that_kills_engines_visits_three_and_those_beside_it_are_answered(
    dies_at: int, kills: str
) -> None:
    """Law: also if tokens come before each end, whether its connections break or the supervisor finds the engine dead;
    who asks the same again kills none."""
    prompts = [[i, 7] for i in range(1, 9)]
    async with serve(Mortal(tick_s=0.001, dies_at=dies_at)) as one, serve(Mortal(tick_s=0.001, dies_at=dies_at)) as two:
        client = EngineClient(one.url, two.url, end=END)

        def broken(engine: Mortal) -> None:
            if kills == "connections":
                for transport in list(engine.transports.values()):
                    transport.close()
            else:
                client.dismiss([engine.url], died=True)
                client.admit([engine.url])

        for engine in (one, two):
            engine.dies = partial(broken, engine)
        deadly = asyncio.create_task(client.generate([DEADLY, 1], PARAMS))
        check(prompts, await settled(client, prompts, asyncio.sleep(0)))
        for asked in (deadly, client.generate([DEADLY, 1], PARAMS)):
            with pytest.raises(
                DeadlyRequest, match=rf"^engines died under it: {MAX_DEATHS} engines .* on a request of 2 ids.*http"
            ):
                await asked
        assert one.deaths + two.deaths == MAX_DEATHS
        check([[9, 9]], [await client.generate([9, 9], PARAMS)])
        assert not client._suspects._trial.locked()
        await client.close()


async def test_engines_that_leave_or_are_paused_are_no_deaths_of_their_requests() -> None:
    async with serve(Deterministic(tick_s=0.005)) as engine:
        client = EngineClient(engine.url, end=END)
        task = asyncio.create_task(client.generate([5, 5], PARAMS))
        for _ in range(2 * MAX_DEATHS):
            while not engine.running:
                await asyncio.sleep(0.001)
            client.dismiss([engine.url])
            client.admit([engine.url])
            await asyncio.sleep(0.002)
            await client.pause()
            client.resume()
        check([[5, 5]], [await task])
        await client.close()


async def test_without_an_engine_requests_wait_for_one() -> None:
    async with serve(Deterministic(tick_s=0.002)) as one, serve(Deterministic()) as other:
        client = EngineClient(one.url, end=END)
        task = asyncio.create_task(client.generate([3, 4], PARAMS))
        while not one.running:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.03)
        client.dismiss([one.url])
        await asyncio.sleep(0.1)
        assert not task.done() and client.engines() == []
        client.admit([other.url])
        check([[3, 4]], [await task])
        assert len(other.requests[0]["input_ids"]) > 2, "it began again"
        await client.close()


async def test_the_wait_for_an_engine_has_a_limit_and_a_name() -> None:
    client = EngineClient(engine_wait_s=0.2)
    with pytest.raises(DeadlineExceeded, match=r"--engine-wait-s.*none is admitted"):
        await client.generate([3], PARAMS)
    await client.close()


async def test_half_an_answer_is_for_those_alone_who_ask_for_it() -> None:
    """Law: what the run takes back is an error, unless its caller asks for the part; its execution is told in any case,
    and what it asks later does not change that. Others go on."""
    async with serve(Deterministic(hold_at=1)) as engine:
        client, transcripts = EngineClient(engine.url, end=END), [Transcript() for _ in range(4)]
        scope = RequestScope()

        def asked(prompt: int, scope: RequestScope | None, **given: Any) -> asyncio.Task[Any]:
            REQUEST_SCOPE.set(scope)
            TRANSCRIPT.set(transcripts[prompt])
            return asyncio.create_task(client.generate([prompt], PARAMS, **given))

        async def all_parts() -> None:
            async for part in client.stream([2], PARAMS):
                assert part.finish_reason == "abort", "no part of it may look like its end"

        part, whole = asked(0, scope, returns_partial=True), asked(1, scope)
        other = asked(3, None, returns_partial=True)
        REQUEST_SCOPE.set(scope)
        TRANSCRIPT.set(transcripts[2])
        streamed = asyncio.create_task(all_parts())
        while len(engine.running) < 4:
            await asyncio.sleep(0.005)
        await client.pause(scope)
        client.resume()
        assert (await part).finish_reason == "abort"
        for task in (whole, streamed):
            with pytest.raises(TakenBack, match=r"cancelled a request after \d+ tokens"):
                await task
        engine.hold_at = None
        check([[3]], [await other])
        check([[1]], [await asked(1, scope)])
        assert [one.taken_back for one in transcripts] == [True, True, True, False]
        await client.close()


async def test_a_session_stays_with_its_engine_and_prompts_share_one() -> None:
    async with serve(FakeEngine()) as one, serve(FakeEngine()) as two:
        client = EngineClient(one.url, two.url)
        for turn in range(3):
            await asyncio.gather(*(client.generate([s, turn], PARAMS, session_id=f"{s}") for s in range(8)))
        for engine in (one, two):
            assert len(engine.requests) == 12 and len({r["input_ids"][0] for r in engine.requests}) == 4
        await asyncio.gather(*(client.generate([77, 78], PARAMS) for _ in range(6)))
        shared = [sum(r["input_ids"] == [77, 78] for r in e.requests) for e in (one, two)]
        assert sorted(shared) == [0, 6]
        await client.close()


async def test_who_waits_gets_each_place_that_becomes_free() -> None:
    """Law: while somebody waits no place is empty, whoever of those who wait is cancelled or ended meanwhile."""
    async with serve(FakeEngine(tick_s=0.001)) as one, serve(FakeEngine(tick_s=0.001)) as two:
        client, rng = EngineClient(one.url, two.url, max_concurrency=3, engine_wait_s=60), random.Random(3)
        tasks = [asyncio.create_task(client.generate([i], PARAMS, session_id=f"{i % 5}")) for i in range(150)]
        while not all(task.done() for task in tasks):
            rng.choice(tasks).cancel()
            url = rng.choice([one.url, two.url])
            if rng.random() < 0.3:
                client.dismiss([url])
                await asyncio.sleep(0.005)
                client.admit([url])
            await asyncio.sleep(0.02)
        assert all(task.cancelled() or len(task.result().tokens) == 40 for task in tasks)
        assert not client._pool._waiting and not client._pool.tries
        await client.close()


async def test_the_limit_counts_time_without_progress_not_the_answer() -> None:
    async with serve(FakeEngine(tick_s=0.005)) as engine:  # an event, which has 64 tokens, takes a fifth of the limit
        client = EngineClient(engine.url, request_timeout_s=1.5)
        assert len((await client.generate([3], {**PARAMS, "max_new_tokens": 480})).tokens) == 480
        await client.close()


@dataclass
class OneAtATime(FakeEngine):
    """Answers one after the other, in the order of the requests; a lost one never."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    lost: int = -1

    async def _sample(self, body: dict[str, Any], stop: asyncio.Event) -> dict[str, Any]:
        if body["input_ids"] == [self.lost]:
            await asyncio.sleep(60)
        async with self.turn:
            return await super()._sample(body, stop)


async def test_queueing_is_no_silence_and_being_passed_by_is() -> None:
    async with serve(OneAtATime(tick_s=0.01, lost=0)) as engine:
        client = EngineClient(engine.url, request_timeout_s=0.8)
        brief = {**PARAMS, "max_new_tokens": 30}
        lost = asyncio.create_task(client.generate([0], brief))
        await asyncio.sleep(0.05)
        began = asyncio.get_running_loop().time()
        queued = [asyncio.create_task(client.generate([1 + i], brief)) for i in range(8)]
        with pytest.raises(DeadlineExceeded, match="--request-timeout-s"):
            await lost
        assert all(len(r.tokens) == 30 for r in await asyncio.gather(*queued))
        assert asyncio.get_running_loop().time() - began > 1.6, "the last one waited longer than the limit"
        await client.close()


async def test_tries_without_a_token_are_bounded() -> None:
    async with serve(FakeEngine()) as engine:
        engine.faults.extend([429] * 99)
        client = EngineClient(engine.url)
        with pytest.raises(EngineError, match="after 5 attempts"):
            await client.generate([3], PARAMS)
        await client.close()
