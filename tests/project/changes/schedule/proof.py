"""The schedule is chosen by its name and makes batches from a fake engine; its setting bounds what runs."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from slime.rollout.manager import RolloutManager
from tests.support.fake_engine import FakeEngine
from tests.support.rollout import rollout_args, with_manager

folder = Path(sys.argv[1])


async def steps(manager: RolloutManager) -> dict[str, float]:
    """Two of them, committed."""
    ledger: dict[str, float] = {}
    for rollout_id in range(2):
        batch, _ = await manager.generate(rollout_id)
        assert len({s.group_index for s in batch.samples}) == 4, "a batch of four groups"
        ledger = manager.commit(rollout_id)
    return ledger


def most_running(at_once: int) -> int:
    """Requests that the engine had at a time: two samples of each group."""
    engine = FakeEngine(tick_s=0.001)
    flags = ("--rollout-schedule", "few_at_once", "--groups-at-once", str(at_once))
    ledger = asyncio.run(with_manager(rollout_args(folder, *flags), engine, steps))
    assert ledger["data/trained"] == 8 and ledger["data/in_flight"] == 0, ledger
    return engine.most_running


assert most_running(1) == 2
assert 2 < most_running(2) <= 4
