"""One of two real engines is killed while it works: every request ends, and is what one request would have been.

Odd ids of the labelled weights have another log-prob than even ones, so that each token tells that an engine sampled it
with these weights; ids and log-probs of an answer are exactly as many as were asked for.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from slime.core.text import EngineKeys
from slime.rollout.client.call import Generation
from slime.rollout.client.engine_client import EngineClient
from slime.rollout.manager import RolloutManager
from slime.serving.server import SGLangServer
from tests.support.engine_state import num_running, relabel
from tests.support.engines import kill, serving, spec_of
from tests.support.rollout import rollout_args

KEY = "a-token-that-nobody-else-has"
HOOKS = str(Path(__file__).parents[2] / "unit" / "rollout" / "rollout_hooks.py")
PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": True, "max_new_tokens": 300}


@pytest.fixture
def victim(tiny_model_path: Path, tmp_path: Path) -> Any:
    """A server of one's own, with a token."""
    with serving(spec_of(tiny_model_path, token_versions=True, api_key=KEY), tmp_path) as server:
        assert KEY not in (tmp_path / "engine.log").read_text(), "the token is in the log"
        assert KEY.encode() not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
        yield server


async def until_streaming(client: EngineClient, *, least: int) -> None:
    """Returns when each engine has some requests, which have got tokens."""
    while not all(sum(one.has_tokens for one in engine.tries) >= least for engine in client._pool.upstreams):
        await asyncio.sleep(0.02)


async def asked_while_one_dies(urls: list[str], victim: SGLangServer) -> list[Generation]:
    client = EngineClient(*urls, keys=EngineKeys(KEY), request_timeout_s=120)
    tasks = [asyncio.create_task(client.generate([2, 40 + i], PARAMS, session_id=f"{i}")) for i in range(16)]
    try:
        await until_streaming(client, least=4)
        assert await asyncio.to_thread(num_running, urls[0]) >= 4
        await asyncio.to_thread(kill, victim)
        answers = await asyncio.gather(*tasks)
        client.dismiss([victim.url])
        again = await client.generate([2, 40], {**PARAMS, "max_new_tokens": 5}, session_id="0")
        assert len(again.tokens) == 5
        return answers
    finally:
        await client.close()


@pytest.mark.slow
def test_requests_outlive_their_engine_and_train_once(
    engine_server: SGLangServer, victim: SGLangServer, tmp_path: Path
) -> None:
    for server, key in ((engine_server, None), (victim, KEY)):
        relabel(server.url, 1, key)
    urls = [engine_server.url, victim.url]
    args = rollout_args(
        tmp_path,
        *("--hf-checkpoint", str(engine_server.model_path), "--custom-rm-path", f"{HOOKS}:reward"),
        *("--rollout-batch-size", "8", "--rollout-max-response-len", "200"),
    )
    answers = asyncio.run(asked_while_one_dies(urls, victim))
    for answer in answers:
        assert len(answer.tokens) == len(answer.log_probs) == PARAMS["max_new_tokens"]
        assert answer.finish_reason == "length" and answer.weight_version == 1 and answer.prompt_tokens == 2

    async def step() -> None:
        """A step of the manager with the dead engine still in its list."""
        manager = RolloutManager(args, engines=urls, keys=EngineKeys(KEY))
        try:
            batch, metrics = await manager.generate(0)
            groups = [s.group_index for s in batch.samples]
            assert len(batch.samples) == 16 and sorted(groups) == sorted([*range(8)] * 2), "lost, or trained twice"
            assert metrics["rollout/num_failed_groups"] == 0
            manager.commit(0)
        finally:
            await manager.close()

    asyncio.run(step())
