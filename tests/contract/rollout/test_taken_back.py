"""Law: an execution of which the run took a request back is not finished, wherever it asked and whatever its code says.

On a real engine: what ends requests are the real ends of a step, the pause before a checkpoint, and a weight sync.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from slime.core.topology import ONE_RANK
from slime.rollout.client.engine_client import EngineClient
from slime.rollout.manager import RolloutManager
from slime.serving.control import HttpEngineControl
from tests.contract.rollout.verdict_hooks import ASKED, TRAINED, asked_of
from tests.support.engine_state import num_running
from tests.support.marks import quick
from tests.support.rollout import rollout_args

HOOKS = "tests.contract.rollout.verdict_hooks"
NUM_STEPS = 3
STEP = ("--over-sampling-batch-size", "8")
KEPT = ("--partial-rollout",)
STALE = ("--max-weight-staleness", "2")
ASYNC = ("--fully-async",)
CASES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "judge, partial rollout": ("--rollout-sample-hook-path", "judged", (*STEP, *KEPT)),
    "judge, staleness": ("--rollout-sample-hook-path", "judged_in_part", (*STEP, *STALE)),
    "judge that swallows": ("--rollout-sample-hook-path", "judged_whatever_happens", (*STEP, *KEPT)),
    "judge that asks again, saves": ("--rollout-sample-hook-path", "asks_again", ASYNC),
    "judge, saves": ("--rollout-sample-hook-path", "judged", ASYNC),
    "search, partial rollout": ("--custom-generate-function-path", "searches", (*STEP, *KEPT)),
    "search, saves": ("--custom-generate-function-path", "searches", (*ASYNC, *KEPT)),
    "filter, partial rollout": ("--dynamic-sampling-filter-path", "filtered", (*STEP, *KEPT)),
    "HTTP, weight syncs": ("--custom-generate-function-path", "over_http", ASYNC),
    "grader over HTTP, weight syncs": ("--custom-rm-path", "graded_over_http", ASYNC),
}
QUICK = "judge, partial rollout"


@pytest.mark.parametrize("case", quick(CASES, QUICK))
def test_no_verdict_that_was_cut_short_is_trained(case: str, front: Any, tmp_path: Path) -> None:
    flag, hook, flags = CASES[case]
    own = ("--hf-checkpoint", str(front.model_path), "--rollout-max-response-len", "24", flag, f"{HOOKS}.{hook}")
    own += ("--rollout-sample-filter-path", f"{HOOKS}.noted")
    args = rollout_args(tmp_path, *own, *flags, synchronous="--fully-async" not in flags)
    host, port = front.url.removeprefix("http://").split(":")
    args = args.replace(sglang_router_ip=host, sglang_router_port=int(port))  # where a run has its router
    control, taken_back = HttpEngineControl(front.url, ONE_RANK, 60.0), 0.0
    TRAINED.clear()

    async def sync_and_save(manager: RolloutManager, syncs: bool) -> None:
        """As the driver does around a checkpoint; an engine that others ask, too, is paused as a weight sync does."""
        await manager.pause(hand_back=not syncs)
        if syncs:
            await asyncio.to_thread(control.pause, "abort")
            await asyncio.to_thread(control.resume)
        manager.resume()

    async def work() -> None:
        nonlocal taken_back
        manager = RolloutManager(args, engines=[front.url])
        try:
            for step in range(NUM_STEPS):
                batch = asyncio.create_task(manager.generate(step))
                pauses = 2 if args.fully_async else 0
                while pauses and not batch.done():
                    if await asyncio.to_thread(num_running, front.url) > 4:
                        pauses -= 1
                        await sync_and_save(manager, "over_http" in hook)
                        await asyncio.wait([batch], timeout=1.5)
                _, metrics = await batch
                taken_back += metrics["rollout/num_aborted_groups"]
                manager.commit(step)
        finally:
            await manager.close()

    asyncio.run(work())
    assert len(TRAINED) == 8 * NUM_STEPS and taken_back, "nothing was taken back, so nothing is shown"
    cut = [one.index for one in TRAINED if not one.metadata.get("whole", one.reward == asked_of(one)["max_new_tokens"])]
    assert not cut, f"{len(cut)} of {len(TRAINED)} were trained on what was cut short"


async def test_others_are_told_to_ask_again_and_the_runs_own_requests_go_on(front: Any) -> None:
    """Law: a weight sync gives nobody half an answer; who ends a request of their own gets what SGLang gives."""
    client, control = EngineClient(front.url), HttpEngineControl(front.url, ONE_RANK, 60.0)
    long = {**ASKED, "max_new_tokens": 400}

    async def asked(session: aiohttp.ClientSession, path: str, **body: Any) -> tuple[int, str]:
        async with session.post(f"{front.url}{path}", json=body) as answer:
            return answer.status, await answer.text()

    chat = {"model": "m", "prompt": "1+1=", "max_tokens": 400, "ignore_eos": True}
    given = {"text": "1+1=", "sampling_params": long}
    async with aiohttp.ClientSession() as session:
        alone = asyncio.create_task(asked(session, "/generate", **given, rid="mine"))
        await asyncio.sleep(0.2)
        await asked(session, "/abort_request", rid="mine")
        status, text = await alone
        assert status == 200 and '"type":"abort"' in text.replace(" ", "")
        own = asyncio.create_task(client.generate([2, 40], long))
        others = [
            asyncio.create_task(asked(session, path, **body))
            for path, body in (
                ("/generate", given),
                ("/generate", {**given, "stream": True}),
                ("/v1/completions", chat),
                ("/v1/completions", {**chat, "stream": True}),
            )
        ]
        await asyncio.sleep(0.4)
        await client.pause()
        await asyncio.to_thread(control.pause, "abort")
        await asyncio.to_thread(control.resume)
        client.resume()
        plain, streamed, completion, streamed_completion = await asyncio.gather(*others)
    assert [plain[0], completion[0]] == [503, 503] and "send it again" in plain[1] and "send it again" in completion[1]
    for _, text in (streamed, streamed_completion):
        assert '"error"' in text and "send it again" in text and '"finish_reason": "length"' not in text
    assert len((await own).tokens) == 400
    await client.close()
