"""Laws of what is said of requests: waits, tokens and busy engines are those of the clock, whatever befalls a try."""

from __future__ import annotations

import asyncio
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from slime.observability.spans import read_trace, start_recording
from slime.rollout.client.call import parse_drafts
from slime.rollout.client.engine_client import EngineClient
from slime.rollout.client.upstream import Try, Upstream
from slime.rollout.traces import MOST_TRACED, ROWS, Sums, Traffic, traffic_metrics
from tests.support.fake_engine import FakeEngine, serve

PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 8}


def test_drafts_are_counted_by_passes_of_the_model() -> None:
    traffic, one = Traffic(), Upstream("http://a", "a.", 0.0)
    event = {"meta_info": {"spec_verify_ct": 4, "spec_num_correct_drafts": 6, "spec_num_proposed_drafts": 12}}
    for drafted in (parse_drafts(event), parse_drafts(event)):
        assert drafted is not None
        traffic.end_try(
            traffic.begin_try(1.0), Try(one, None, 1.0), 2.0, tokens=11, read=(3, 0), again=False, drafted=drafted
        )
    found = traffic_metrics([traffic.take_sums([one], 3.0)])
    assert found["rollout/spec_accept_length"] == 2.5 and found["rollout/spec_accept_rate"] == 0.5
    assert parse_drafts({"meta_info": {"completion_tokens": 3}}) is None, "an engine without a draft says nothing"


def test_each_wait_is_between_two_moments_of_its_try() -> None:
    traffic, one = Traffic(), Upstream("http://a", "a.", 0.0)
    idle = Upstream("http://b", "b.", 5.0)
    for asked, placed, first, end, again in ((10.0, 11.0, 13.0, 17.0, False), (10.0, 14.0, 15.0, 18.0, True)):
        lap = traffic.begin_try(asked)
        tried = Try(one, None, placed)
        one.add_try(tried, placed)
        tried.got_tokens(first)
        tried.got_tokens(end)
        one.remove_try(tried, end)
        traffic.end_try(lap, tried, end, tokens=9, read=(100, 75), again=again)
    found = traffic_metrics([traffic.take_sums([one, idle], 20.0)])
    assert found == {
        "perf/request_place_wait/mean": 2.5,
        "perf/request_place_wait/max": 4.0,
        "perf/request_first_token/mean": 1.5,
        "perf/request_first_token/max": 2.0,
        "perf/request_decode_tokens_per_sec": 16 / 7.0,
        "perf/requests_in_flight": (5.0 + 3.0 + 7.0) / 10.0,
        "perf/tokens_in_flight": (100 * 6.0 + 4.5 * 4.0 + 100 * 4.0 + 4.5 * 3.0) / 10.0,
        "perf/requests_repeated": 1.0,
        "perf/prefix_cache_hit_rate": 0.75,
        "perf/engine_idle_ratio": 1 - (6.0 + 4.0) / 20.0,
    }
    assert traffic.take_sums([one, idle], 30.0) is None, "each batch tells its own"


def test_an_engine_is_busy_while_it_has_a_request_also_across_batches() -> None:
    engine = Upstream("http://a", "a.", 0.0)
    one, two = Try(engine, None, 1.0), Try(engine, None, 2.0)
    engine.add_try(one, 1.0)
    engine.add_try(two, 2.0)
    engine.remove_try(one, 4.0)
    assert engine.take_busy_s(5.0) == 4.0
    engine.remove_try(two, 7.0)
    engine.remove_try(two, 9.0)
    assert engine.take_busy_s(20.0) == 2.0


def test_a_client_tells_of_all_its_tries(tmp_path: Path) -> None:
    """Law: one that failed counts as a try, its time as waiting; rows of the trace never overlap, and are few."""
    engine = FakeEngine(tick_s=0.001)
    engine.faults.extend([503, None])

    async def main() -> tuple[dict[str, float], dict[str, float]]:
        async with serve(engine):
            client = EngineClient(engine.url, max_concurrency=4)
            assert client.take_traffic() is None
            await asyncio.gather(*(client.generate([5, 6, i], PARAMS) for i in range(MOST_TRACED + 36)))
            found = traffic_metrics([client.take_traffic()])
            again = traffic_metrics([client.take_traffic()])
            await client.close()
            return found, again

    spans = start_recording("rollout", tmp_path)
    try:
        found, again = asyncio.run(main())
    finally:
        spans.close()
        start_recording("main", None)
    assert again == {} and found["perf/requests_repeated"] == 1.0
    assert 1.0 < found["perf/requests_in_flight"] <= MOST_TRACED + 36
    assert 0.0 <= found["perf/engine_idle_ratio"] < 1.0 and all(map(math.isfinite, found.values()))
    rows: dict[Any, list[tuple[float, float]]] = {}
    (path,) = tmp_path.iterdir()
    events = [event for event in read_trace(path) if event["ph"] == "X"]
    for event in events:
        rows.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    num_traced = sum(event["name"] == "request: place" for event in events)
    assert len(rows) == ROWS <= num_traced <= MOST_TRACED
    for stretches in rows.values():
        stretches.sort()
        assert all(end <= begin + 1 for (_, end), (begin, _) in pairwise(stretches))


def test_who_gets_no_place_leaves_his_row_to_others() -> None:
    traffic = Traffic()
    for _ in range(3 * ROWS):
        traffic.end_try(traffic.begin_try(0.0), None, 1.0, tokens=0, read=(0, 0), again=False)
    laps = [traffic.begin_try(1.0) for _ in range(2 * ROWS)]
    assert sorted(lap.row for lap in laps if lap.row is not None) == list(range(ROWS))
    assert traffic_metrics([traffic.take_sums([], 2.0)])["perf/request_place_wait/mean"] == pytest.approx(1.0)


def test_two_periods_of_a_process_are_told_as_one() -> None:
    """Law: what is told late is part of a longer period, not of a second process."""
    one = Sums(period_s=10.0, num=2, place_s=4.0, most_place_s=3.0, tokens=7, token_s=50.0, idle=0.5)
    two = Sums(period_s=30.0, num=1, place_s=2.0, most_place_s=2.0, tokens=1, token_s=10.0, idle=0.1)
    both = one.joined(two)
    assert (both.period_s, both.num, both.most_place_s, both.tokens) == (40.0, 3, 3.0, 8)
    assert both.idle == pytest.approx((5.0 + 3.0) / 40.0)
    assert traffic_metrics([both])["perf/tokens_in_flight"] == 60.0 / 40.0
