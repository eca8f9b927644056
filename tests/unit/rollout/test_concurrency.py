"""Laws of `--rollout-concurrency adaptive`: the number of requests settles where an engine is full and nothing queues.

The simulated engine runs requests like SGLang: it admits one if its KV cache has room for its prompt, each running
request adds a token per step, and if the cache is full, the newest requests lose their memory and queue again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from slime.core.errors import EngineError
from slime.rollout.client import engine_client
from slime.rollout.client.engine_client import EngineClient
from slime.rollout.client.engine_pool import EnginePool
from slime.rollout.client.upstream import LOWEST_SHARE, START, Concurrency, Load
from slime.rollout.traces import LoadSums, load_metrics
from tests.support.fake_engine import FakeEngine, serve

MAX_KV_USE = 0.9


@dataclass
class SimulatedEngine:
    """`slots`: most requests that run together. `kv`: tokens in the cache."""

    slots: int
    kv: int
    now: float = 0.0
    running: list[list[int]] = field(default_factory=list)
    """[client, tokens so far, tokens at the end] of each request."""
    queue: deque[list[int]] = field(default_factory=deque)
    num_retracted: int = 0

    @property
    def used(self) -> int:
        return sum(tokens for _, tokens, _ in self.running)

    def step(self) -> list[int]:
        """One decode step. Returns the clients of the requests that ended."""
        self.now += 0.05
        while self.queue and len(self.running) < self.slots and self.used + self.queue[0][1] < self.kv:
            self.running.append(self.queue.popleft())
        while self.used + len(self.running) > self.kv:
            self.queue.appendleft(self.running.pop())
            self.num_retracted += 1
        for request in self.running:
            request[1] += 1
        ended = [request[0] for request in self.running if request[1] >= request[2]]
        self.running = [request for request in self.running if request[1] < request[2]]
        return ended

    def report(self) -> Load:
        retracted, self.num_retracted = self.num_retracted, 0
        return Load(self.now, len(self.running), len(self.queue), retracted, self.used / self.kv)


def simulate(
    engine: SimulatedEngine, clients: list[Concurrency], *, seconds: int, demand: int = 10_000, joins: int = 0
) -> list[tuple[list[int], Load]]:
    """Clients that always have `demand` requests for an engine, all but the first from second `joins` on. Returns the
    limits and the report of each second."""
    rng, in_flight, full, seen = random.Random(0), [0] * len(clients), [False] * len(clients), []
    for second in range(seconds):
        for _ in range(20):
            for client, follows in enumerate(clients if second >= joins else clients[:1]):
                while in_flight[client] < min(follows.limit, demand):
                    engine.queue.append([client, 20, 20 + rng.randint(20, 300)])
                    in_flight[client] += 1
                full[client] = full[client] or in_flight[client] >= follows.limit
            for client in engine.step():
                in_flight[client] -= 1
        load = engine.report()
        for client, follows in enumerate(clients):
            assert follows.take(load, in_flight=in_flight[client], is_needed=full[client])
            full[client] = False
        seen.append(([follows.limit for follows in clients], load))
    return seen


def follower(most: int = 512) -> Concurrency:
    return Concurrency(most, max_kv_use=MAX_KV_USE)


class Fixed(Concurrency):
    """As without `adaptive`."""

    def __init__(self) -> None:
        super().__init__(512, max_kv_use=MAX_KV_USE)
        self._level = 512.0

    def take(self, load: Load, *, in_flight: int, is_needed: bool) -> bool:
        return True


@pytest.mark.parametrize(("slots", "kv"), [(48, 1_000_000), (400, 12_000), (6, 1_000_000)])
def test_the_limit_settles_where_the_engine_is_full_and_little_queues(slots: int, kv: int) -> None:
    """Law: whether slots or memory is scarce, the engine is as busy as one with a queue that is never empty, and far
    fewer requests queue or lose their memory."""
    seen = simulate(SimulatedEngine(slots, kv), [follower()], seconds=160)[60:]
    flooded = simulate(SimulatedEngine(slots, kv), [Fixed()], seconds=160)[60:]

    def mean(rows: list[tuple[list[int], Load]], what: str) -> float:
        return sum(getattr(load, what) for _, load in rows) / len(rows)

    assert mean(seen, "running") > 0.85 * mean(flooded, "running")
    assert mean(seen, "queued") < 0.15 * mean(seen, "running") + 1 < mean(flooded, "queued")
    assert mean(seen, "retracted") <= mean(flooded, "retracted") / 2
    assert max(limits[0] for limits, _ in seen) < 1.5 * mean(flooded, "running") + 2


def test_the_limit_rises_to_its_most_while_nothing_queues_and_only_if_it_is_needed() -> None:
    ample = SimulatedEngine(10_000, 10_000_000)
    assert simulate(ample, [follower()], seconds=10)[-1][0] == [512], "twofold each time"
    idle = SimulatedEngine(10_000, 10_000_000)
    assert {limits[0] for limits, _ in simulate(idle, [follower()], seconds=10, demand=START // 2)} == {START}


def test_clients_of_one_engine_share_it_and_a_new_one_gets_its_part() -> None:
    engine, clients = SimulatedEngine(60, 1_000_000), [follower(), follower()]
    seen = simulate(engine, clients, seconds=300, joins=60)[150:]
    shares = [sum(limits[i] for limits, _ in seen) / len(seen) for i in range(2)]
    assert 50 < sum(shares) < 90 and min(shares) > 0.25 * sum(shares), shares


def test_a_report_is_taken_once_and_nothing_changes_while_the_surplus_drains() -> None:
    follows = follower()
    busy = [Load(float(at), 8, 24, 0, 0.5) for at in range(4)]
    assert follows.take(busy[0], in_flight=32, is_needed=True) and follows.limit == START, "a queue may be a prefill"
    assert not follows.take(busy[0], in_flight=32, is_needed=True) and follows.limit == START
    follows.take(busy[1], in_flight=32, is_needed=True)
    assert follows.limit == START * LOWEST_SHARE
    for load in busy[2:]:
        follows.take(load, in_flight=32, is_needed=True)
    assert follows.limit == START * LOWEST_SHARE, "those reports show what the old limit did"
    at = 10.0
    while follows.limit > 1:
        at += 1.0
        follows.take(Load(at, 0, 5, 1, 1.0), in_flight=0, is_needed=True)
    follows.take(Load(at + 1, 0, 5, 1, 1.0), in_flight=0, is_needed=True)
    assert follows.limit == 1, "a request must be able to show that the engine has room again"


def test_a_full_cache_stops_the_rise_and_a_retraction_lowers_the_limit() -> None:
    follows = follower()
    follows.take(Load(1.0, 32, 0, 0, 0.95), in_flight=32, is_needed=True)
    assert follows.limit == START
    follows.take(Load(2.0, 32, 0, 0, 0.5), in_flight=32, is_needed=True)
    assert START < follows.limit < 1.1 * START, "no longer twofold"
    before = follows.limit
    follows.take(Load(3.0, 32, 0, 2, 0.99), in_flight=32, is_needed=True)
    assert follows.limit < before


def test_reports_of_groups_are_added_and_another_form_is_refused() -> None:
    one = {"timestamp": 5.0, "num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.25}
    two = {**one, "timestamp": 6.0, "token_usage": 0.75, "queues": {"retracted": 2}}
    assert Load.of({"loads": [one, two]}) == Load(6.0, 6, 2, 2, 0.75)
    for other in ({}, {"loads": [{}]}, {"loads": []}, {"loads": [{**one, "token_usage": "much"}]}):
        with pytest.raises(EngineError, match="another form"):
            Load.of(other)


async def test_a_fallen_limit_interrupts_nothing_and_requests_keep_their_order() -> None:
    """Law: running attempts stay; those that wait get slots in the order in which they came."""
    pool = EnginePool(["http://a"], most_per_engine=64, max_kv_use=MAX_KV_USE, silence_limit_s=60.0, wait_limit_s=60.0)
    order: list[int] = []

    async def ask(number: int) -> Any:
        one = await pool.acquire(session=None, prompt=None, scope=None, is_over=lambda: False)
        order.append(number)
        return one

    tasks = [asyncio.create_task(ask(number)) for number in range(START + 8)]
    await asyncio.sleep(0.01)
    (upstream,) = pool.upstreams
    assert order == list(range(START)) and upstream.was_full
    for at in (1.0, 2.0):
        pool.reported(upstream, Load(at, START // 2, START // 2, 0, 0.5))
    assert upstream.most == START // 2 and len(upstream.tries) == START and not any(t.interrupted for t in pool.tries)
    for task in tasks[: START // 2]:
        pool.release(await task)
    await asyncio.sleep(0.01)
    assert len(order) == START, "the surplus drains first"
    for number in range(START // 2, START // 2 + 3):
        pool.release(await tasks[number])
    await asyncio.sleep(0.01)
    assert order == list(range(START + 3))
    pool.reported(upstream, Load(3.0, START // 2, 0, 0, 0.5))
    await asyncio.sleep(0.01)
    assert upstream.most == START // 2 + 1 and order == list(range(START + 4)), "one more slot wakes one more"
    for task in tasks:
        task.cancel()
    await pool.close()


async def test_without_a_report_the_last_limit_holds_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_client, "LOADS_EVERY_S", 0.01)
    engine = FakeEngine(hold_at=2)
    async with serve(engine):
        client = EngineClient(engine.url, max_concurrency=512, max_kv_use=MAX_KV_USE)
        with caplog.at_level(logging.WARNING):
            asked = [asyncio.create_task(client.generate([5, 6], {"max_new_tokens": 4})) for _ in range(START + 5)]
            while not caplog.records:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
        assert len(engine.running) == START
        engine.hold_at = None
        made = await asyncio.gather(*asked)
        await client.close()
    assert [record.getMessage().startswith(f"engine {engine.url} does not report") for record in caplog.records] == [
        True
    ]
    assert all(len(one.tokens) == 4 for one in made) and client.take_loads() == {}


def test_metrics_are_those_of_each_engine_over_all_processes() -> None:
    here, there = LoadSums(), LoadSums()
    for at, queued in enumerate((0, 4)):
        here.add(Load(float(at), 8, queued, 0, 0.5), limit=10 + at)
    there.add(Load(9.0, 8, 6, 0, 0.8), limit=20)
    other = LoadSums()
    other.add(Load(1.0, 1, 0, 0, 0.2), limit=3)
    found = load_metrics([{"a": here, "b": other}, {"a": there}], {"a": 0, "b": 1})
    assert {name: found[f"perf/engine_limit/{name}"] for name in ("0", "1", "min", "max", "mean")} == {
        "0": 31.0,
        "1": 3.0,
        "min": 3.0,
        "max": 31.0,
        "mean": 17.0,
    }
    assert found["perf/engine_queue/0"] == pytest.approx(10 / 3) and found["perf/engine_queue/max"] == 6.0
    assert found["perf/engine_kv_use/0"] == pytest.approx(0.6) and found["perf/engine_kv_use/max"] == 0.8
    assert load_metrics([{}], {}) == {}
