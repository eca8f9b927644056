"""The limit on requests follows what a real engine reports about itself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from slime.rollout.client import engine_client
from slime.rollout.client.engine_client import EngineClient
from slime.rollout.client.engine_pool import EnginePool
from slime.rollout.client.upstream import START, Load, Upstream
from tests.support.engines import serving, spec_of

pytestmark = pytest.mark.slow

RUNS, REQUESTS, TOKENS = 4, 120, 64
"""What the engine runs at a time, and what is asked of it."""


def test_requests_settle_at_what_a_real_engine_runs(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: an engine that runs four requests at a time has few in its queue once the surplus of the start is done, and
    is not idle for it; every request gets all its tokens."""
    monkeypatch.setattr(engine_client, "LOADS_EVERY_S", 0.1)
    seen: list[tuple[int, Load]] = []
    reported = EnginePool.reported

    def noted(pool: EnginePool, upstream: Upstream, load: Load) -> bool:
        is_new = reported(pool, upstream, load)
        if is_new:
            seen.append((upstream.most, load))
        return is_new

    monkeypatch.setattr(EnginePool, "reported", noted)

    async def flood(url: str) -> list[Any]:
        client = EngineClient(url, max_concurrency=64, max_kv_use=0.9)
        params = {"max_new_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0}
        try:
            made = await asyncio.gather(
                *(client.generate([5, 6, number % 90 + 3], params) for number in range(REQUESTS))
            )
            (sums,) = client.take_loads().values()
            assert sums.num == len(seen) and sums.limit == seen[-1][0]
            return made
        finally:
            await client.close()

    with serving(spec_of(tiny_model_path, extra={"max_running_requests": RUNS}), tmp_path) as server:
        made = asyncio.run(flood(server.url))
    assert [len(one.tokens) for one in made] == [TOKENS] * REQUESTS
    assert max(load.running for _, load in seen) == RUNS and 0 < max(load.kv_use for _, load in seen) <= 1
    settled = [(limit, load) for limit, load in seen[len(seen) // 2 :] if load.running]
    assert max(load.queued for _, load in seen) > START / 2, "at first, as many as a limit without a report allows"
    assert median(limit for limit, _ in settled) <= 3 * RUNS, [limit for limit, _ in seen]
    assert fmean(load.queued for _, load in settled) <= 2 * RUNS, [load.queued for _, load in seen]
    assert fmean(load.running for _, load in settled) >= RUNS / 2, [load.running for _, load in seen]
