"""One of 64 requests never answers, on the real engine: the others train, its group is quarantined at the
deadline and survives a resume."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from slime.rollout.manager import BUFFER_FILE, RolloutManager
from tests.contract.rollout.swallowing_proxy import SwallowingProxy, swallowing
from tests.support.engine_state import relabel
from tests.support.rollout import rollout_args

pytestmark = pytest.mark.slow
HOOKS = str(Path(__file__).parents[2] / "unit" / "rollout" / "rollout_hooks.py")
LIMIT_S = 10


def settings(tmp_path: Path, engine_server: Any, *flags: str, synchronous: bool) -> Any:
    return rollout_args(
        tmp_path,
        "--hf-checkpoint",
        str(engine_server.model_path),
        "--custom-rm-path",
        f"{HOOKS}:reward",
        "--rollout-batch-size",
        "8",
        "--n-samples-per-prompt",
        "8",
        "--request-timeout-s",
        str(LIMIT_S),
        *flags,
        synchronous=synchronous,
    )


async def step(manager: RolloutManager, number: int, url: str, trained: set[int]) -> tuple[dict[str, float], Any]:
    """Generates and commits; -> (metrics, ledger)."""
    batch, metrics = await manager.generate(number)
    groups = {s.group_index for s in batch.samples}
    assert len(groups) == 8 and len(batch.samples) == 64 and not groups & trained
    trained |= groups
    ledger = manager.commit(number)
    await asyncio.to_thread(relabel, url, number + 2)
    return metrics, ledger


def is_the_prompt_of(proxy: SwallowingProxy, request: dict[str, Any]) -> bool:
    asked = proxy.swallowed[0]["input_ids"]
    return bool(request["input_ids"][: len(asked)] == asked)


async def in_turn(args: Any, engine_url: str, folder: Path) -> None:
    trained: set[int] = set()
    async with swallowing(engine_url) as proxy:
        manager = RolloutManager(args, engines=[proxy.url])
        try:
            metrics, ledger = await step(manager, 0, engine_url, trained)
            assert metrics["rollout/num_quarantined_groups"] == 1 and metrics["rollout/num_failed_groups"] == 0
            assert ledger["data/returned/quarantined"] == 1 and 0 not in trained
            assert sum(is_the_prompt_of(proxy, r) for r in proxy.requests) == 8, "not issued again in its step"
            await manager.save(folder)
        finally:
            await manager.close()
    buffered = json.loads((folder / BUFFER_FILE).read_text())["buffered"]
    assert 0 in [group["group_index"] for group in buffered]
    manager = RolloutManager(args, engines=[engine_url])
    try:
        manager.load(folder)
        _, ledger = await step(manager, 1, engine_url, trained)
        assert trained == set(range(16)) and ledger["data/failed"] == 0
    finally:
        await manager.close()


async def without_pause(args: Any, engine_url: str, folder: Path) -> None:
    trained: set[int] = set()
    async with swallowing(engine_url) as proxy:
        manager = RolloutManager(args, engines=[proxy.url])
        try:
            began = asyncio.get_running_loop().time()
            await step(manager, 0, engine_url, trained)
            assert asyncio.get_running_loop().time() - began < LIMIT_S, "the batch waited for the silent request"
            await asyncio.sleep(LIMIT_S)
            metrics, ledger = await step(manager, 1, engine_url, trained)
            assert metrics["rollout/num_quarantined_groups"] + ledger["data/returned/quarantined"] >= 1
            assert len(proxy.swallowed) == 1 and 0 not in trained
            await manager.save(folder)
        finally:
            await manager.close()
    manager = RolloutManager(args, engines=[engine_url])
    try:
        manager.load(folder)
        for number in range(2, 6):
            _, ledger = await step(manager, number, engine_url, trained)
            if 0 in trained:
                break
        assert 0 in trained and ledger["data/failed"] == 0
    finally:
        await manager.close()


def test_the_others_train_and_the_group_survives_a_resume(tmp_path: Path, engine_server: Any) -> None:
    relabel(engine_server.url, 1)
    args = settings(tmp_path, engine_server, synchronous=True)
    asyncio.run(in_turn(args, engine_server.url, tmp_path))
    relabel(engine_server.url, 1)


def test_a_worker_goes_on_and_the_group_survives_a_resume(tmp_path: Path, engine_server: Any) -> None:
    relabel(engine_server.url, 1)
    args = settings(tmp_path, engine_server, "--fully-async", "--max-groups-in-flight", "10", synchronous=False)
    asyncio.run(without_pause(args, engine_server.url, tmp_path))
    relabel(engine_server.url, 1)
