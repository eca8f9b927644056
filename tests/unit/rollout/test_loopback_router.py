"""Law: HTTP clients of a plugin that know none of the run's keys reach its engines from within the run, and nobody
else does; what they sampled is known as well as what the run's own client samples.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from slime.core.batch import TrainBatch
from slime.core.errors import GroupsFailed
from slime.core.sample import NOT_SAMPLED
from slime.core.text import EngineKeys
from slime.rollout.client.engine_client import REQUEST_SCOPE, RequestScope
from slime.rollout.context import RolloutContext, current, use
from slime.rollout.loopback_router import LoopbackRouter, user_of
from slime.rollout.manager import RolloutManager
from slime.rollout.transcript import STRAYS, TRANSCRIPT, Transcript
from slime.rollout.types import Progress
from slime.rollout.user_functions import reachable
from tests.support.fake_engine import FakeEngine, serve
from tests.support.loopback import served
from tests.support.openness import is_on_loopback_device
from tests.support.rollout import rollout_args, with_manager

CLIENTS = {
    "httpx": """
import httpx
async def ask(url, payload):
    async with httpx.AsyncClient(timeout=None) as client:
        answer = await client.post(url, json=payload)
        answer.raise_for_status()
        return answer.json()
""",
    "aiohttp": """
import aiohttp
SESSION = []
async def ask(url, payload):
    if not SESSION:
        SESSION.append(aiohttp.ClientSession())  # one for all executions
    async with SESSION[0].post(url, json=payload) as answer:
        return await answer.json()
""",
    "requests": """
import asyncio, requests
async def ask(url, payload):
    return (await asyncio.to_thread(requests.post, url, json=payload)).json()
""",
    "a stream": """
import json, httpx
async def ask(url, payload):
    async with httpx.AsyncClient(timeout=None) as client:
        async with client.stream("POST", url, json={**payload, "stream": True}) as answer:
            lines = [line[5:] async for line in answer.aiter_lines() if line.startswith("data:")]
    assert lines.pop().strip() == "[DONE]"
    parts = [json.loads(line) for line in lines]
    assert [p["meta_info"]["finish_reason"] for p in parts[:-1]] == [None] * (len(parts) - 1)
    assert all(one["text"].startswith(other["text"]) for other, one in zip(parts, parts[1:]))
    return parts[-1]
""",
    "one address for all": """
import httpx
KNOWN = []
async def ask(url, payload):
    KNOWN.append(url)
    async with httpx.AsyncClient(timeout=None) as client:
        return (await client.post(KNOWN[0], json=payload)).json()
""",
}
PLUGIN = """
async def generate(args, sample, sampling_params):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.tokens, sample.response_length, sample.loss_mask, sample.rollout_log_probs = [5, 6, 7], 0, [], []
    for turn in range(2):
        payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True, "rid": "x"}
        output = await ask(url, payload)
        pairs = output["meta_info"]["output_token_logprobs"]
        between = [90 + sample.index % 8] if not turn else []
        sample.tokens = sample.tokens + [pair[1] for pair in pairs] + between
        sample.loss_mask += [1] * len(pairs) + [0] * len(between)
        sample.rollout_log_probs += [pair[0] for pair in pairs] + [0.0] * len(between)
        sample.response_length = len(sample.loss_mask)
        sample.response += output["text"]
    sample.status = sample.Status.COMPLETED
    return sample
"""
KEYS = EngineKeys(use="sesame")


def trained_by(tmp_path: Path, source: str, *flags: str, engine: FakeEngine | None = None) -> TrainBatch:
    (tmp_path / "own.py").write_text(source + PLUGIN)
    args = rollout_args(tmp_path, "--custom-generate-function-path", f"{tmp_path}/own.py:generate", *flags)

    async def work(manager: RolloutManager) -> Any:
        return (await manager.generate(0))[0]

    batch: TrainBatch = asyncio.run(with_manager(args, engine or FakeEngine(), work, KEYS))
    return batch


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_without_keys_trains_what_it_sampled(tmp_path: Path, client: str) -> None:
    engine = FakeEngine(weight_version="3")
    batch = trained_by(tmp_path, CLIENTS[client], engine=engine)
    assert engine.keys == {"Bearer sesame"} and len(batch.samples) == 8
    for sample in batch.samples:
        assert sample.token_versions.tolist() == [3] * 8 + [NOT_SAMPLED] + [3] * 8
        assert sample.loss_mask.sum() == 16


REWARDS = {
    "in a process of many": """
import httpx
async def judge(args, sample):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    payload = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}
    async with httpx.AsyncClient(timeout=None) as client:
        answer = await client.post(url, json=payload)
    return float(answer.json()["meta_info"]["completion_tokens"])
""",
    "in a process of its own": """
import requests
def judge(args, sample):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    payload = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}
    return float(requests.post(url, json=payload).json()["meta_info"]["completion_tokens"])
""",
}


@pytest.mark.parametrize("kind", REWARDS)
def test_a_reward_function_asks_the_engines_without_a_key(tmp_path: Path, kind: str) -> None:
    (tmp_path / "judge.py").write_text(REWARDS[kind])
    engine, known = FakeEngine(weight_version="3"), STRAYS.num_sampled()
    args = rollout_args(tmp_path, "--custom-rm-path", f"{tmp_path}/judge.py:judge", "--disable-rewards-normalization")

    async def work(manager: RolloutManager) -> TrainBatch:
        return (await manager.generate(0))[0]

    batch: TrainBatch = asyncio.run(with_manager(args, engine, work, KEYS))
    assert {sample.reward for sample in batch.samples} == {2.0} and engine.keys == {"Bearer sesame"}
    assert STRAYS.num_sampled() == known, "its answers are not trained on"


def test_its_requests_are_held_to_the_limits_of_the_execution(tmp_path: Path) -> None:
    engine = FakeEngine()
    trained_by(tmp_path, CLIENTS["httpx"], "--rollout-max-total-response-len", "10", engine=engine)
    assert {request["sampling_params"]["max_new_tokens"] for request in engine.requests} == {8, 2}


def on_loopback(
    tmp_path: Path, work: Any, *flags: str, router: str | None = None, engine: FakeEngine | None = None
) -> Any:
    """Runs `work` inside a call of a user's function, with its settings."""

    async def main() -> Any:
        served_by, args = engine or FakeEngine(), rollout_args(tmp_path, *flags)
        if router is not None:
            host, port = router.removeprefix("http://").split(":")
            args = args.replace(sglang_model_routers={"default": (host, int(port))})
        async with serve(served_by):
            manager = RolloutManager(args, engines=[served_by.url])
            loopback = LoopbackRouter(args, manager._clients, KEYS)
            context = RolloutContext(args, manager._client, None, None, Progress(), asyncio.get_running_loop())
            object.__setattr__(context, "loopback", loopback)
            try:
                with use(context), reachable(args) as own:
                    return await work(own)
            finally:
                await loopback.close()
                await manager.close()

    return asyncio.run(main())


def test_nobody_else_is_served(tmp_path: Path) -> None:
    """Law: another user of the machine gets 403, and another machine gets no connection."""
    payload = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}}

    async def work(args: Any) -> None:
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
        assert await statuses(url, payload) == [200, 200]
        real = os.getuid
        os.getuid = lambda: real() + 1
        try:
            assert await statuses(url, payload) == [403, 403]
        finally:
            os.getuid = real
        if real() == 0 and shutil.which("setpriv"):
            code = f"import urllib.request as u; u.urlopen(u.Request({url!r}, {json.dumps(payload).encode()!r}))"
            as_nobody = ["setpriv", "--reuid", "65534", "--clear-groups", sys.executable, "-I", "-c", code]
            done = await asyncio.to_thread(subprocess.run, as_nobody, capture_output=True, text=True, cwd="/")
            assert "HTTP Error 403" in done.stderr, done.stderr

    async def statuses(url: str, payload: Any) -> list[int]:
        async with aiohttp.ClientSession() as session:
            found = []
            for _ in range(2):  # over one connection
                async with session.post(url, json=payload) as answer:
                    found.append(answer.status)
            return found

    on_loopback(tmp_path, work)


def test_other_machines_get_no_connection(tmp_path: Path) -> None:
    async def work(args: Any) -> None:
        assert is_on_loopback_device(args.sglang_router_port)

    on_loopback(tmp_path, work)
    with socket.create_server(("0.0.0.0", 0)) as others:
        assert not is_on_loopback_device(others.getsockname()[1])


def test_an_interrupted_request_of_nobody_in_particular_puts_back_all_who_may_have_sent_it(tmp_path: Path) -> None:
    """Law: no partial answer is trained, even if the client kept the address of another execution."""
    transcript, engine = Transcript(), FakeEngine(tick_s=0.01)

    async def work(args: Any) -> None:
        shared = f"http://127.0.0.1:{args.sglang_router_port}/generate"
        context = current()
        asking = asyncio.create_task(one_answer(shared, {"input_ids": [5], "sampling_params": {"max_new_tokens": 400}}))
        while not engine.running and not asking.done():
            await asyncio.sleep(0.01)
        assert not transcript.taken_back
        scope = REQUEST_SCOPE.get()
        assert scope is not None
        await context.engine().abort_scope(scope)
        assert (await asking)["meta_info"]["finish_reason"]["type"] == "abort" and transcript.taken_back

    def run() -> None:
        TRANSCRIPT.set(transcript)
        REQUEST_SCOPE.set(RequestScope())
        on_loopback(tmp_path, work, engine=engine)

    contextvars.copy_context().run(run)


async def one_answer(url: str, payload: Any) -> Any:
    async with aiohttp.ClientSession() as session, session.post(url, json=payload) as answer:
        return await answer.json()


def test_the_user_of_a_connection_is_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listens, socket.create_connection(listens.getsockname()) as here:
        there, peer = listens.accept()
        with there:
            assert peer == here.getsockname() and user_of(peer, there.getsockname()) == os.getuid()
            assert user_of(("127.0.0.1", 1), there.getsockname()) is None


def test_what_the_engine_client_cannot_do_is_said(tmp_path: Path) -> None:
    async def work(args: Any) -> None:
        at = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
        async with aiohttp.ClientSession() as session:
            for path, body, status, said in (
                ("/generate", {"input_ids": [5], "lora_path": "x"}, 400, "does not support lora_path = 'x'"),
                ("/generate", {"input_ids": [5], "top_logprobs_num": 2}, 400, "does not support top_logprobs_num = 2"),
                ("/generate", {"input_ids": [5], "n_tokens": 3}, 400, "does not support n_tokens = 3"),
                ("/generate", [1], 400, "must be a JSON object"),
                ("/generate", {"input_ids": [10**6]}, 400, "vocabulary"),
                ("/workers", {}, 404, "not available here"),
                ("/v1/chat/completions", {}, 503, "requires a router"),
            ):
                async with session.post(f"{at}{path}", json=body) as answer:
                    assert (answer.status, said in await answer.text()) == (status, True), (path, await answer.text())

    on_loopback(tmp_path, work)


def test_request_fields_that_change_nothing_are_ignored(tmp_path: Path) -> None:
    """Law: SGLang's fields are accepted with values that mean what the answer has anyway."""
    neutral = {
        **{"logprob_start_len": 1, "stream": False, "rid": "r", "return_text_in_logprobs": False, "model": "any name"},
        **{"top_logprobs_num": 0, "lora_path": None, "token_ids_logprob": [], "return_hidden_states": False},
        **{"image_data": None, "modalities": None, "session_params": None, "priority": 3, "log_metrics": True},
    }

    async def work(args: Any) -> None:
        at = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4}, "return_logprob": True}
        async with aiohttp.ClientSession() as session:
            async with session.post(at, json={**body, **neutral}) as answer:
                assert answer.status == 200, await answer.text()
                meta = (await answer.json())["meta_info"]
            assert meta["input_token_logprobs"] == [[None, 6, None], [None, 7, None]]
            for first in (0, 3, -1):
                async with session.post(at, json={**body, "logprob_start_len": first}) as answer:
                    told = (await answer.json())["meta_info"].get("input_token_logprobs")
                    assert (told if told is None else len(told)) == {0: 3, 3: 0, -1: None}[first]

    on_loopback(tmp_path, work)


def test_why_a_request_was_refused_is_in_the_error_of_the_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Law: where a client says only the status, the run says the reason."""

    async def work(manager: RolloutManager) -> None:
        await manager.generate(0)

    hook = f"{Path(__file__).with_name('truth_hooks.py')}:asks_wrongly"
    args = rollout_args(tmp_path, "--custom-generate-function-path", hook)
    with pytest.raises(GroupsFailed, match=r"400.*; the first answer with .*does not support top_logprobs_num = 5"):
        asyncio.run(with_manager(args, FakeEngine(), work))
    assert caplog.text.count("a request to /generate is refused: the engine client does not support") == 1


def test_chat_requests_reach_the_router_with_its_key(tmp_path: Path) -> None:
    seen = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.path, request.headers.get("Authorization"), await request.json()))
        return web.json_response({"choices": []}, status=201)

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/{any:.*}", answer)
        async with served(app) as router:
            await asyncio.to_thread(on_loopback, tmp_path, work, router=router)

    async def work(args: Any) -> None:
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/v1/chat/completions"
        async with aiohttp.ClientSession() as session, session.post(url, json={"model": "m"}) as found:
            assert (found.status, await found.json()) == (201, {"choices": []})

    asyncio.run(main())
    assert seen == [("/v1/chat/completions", "Bearer sesame", {"model": "m"})]


def test_a_router_that_the_user_made_reachable_stays_the_address(tmp_path: Path) -> None:
    async def work(args: Any) -> Any:
        return args.sglang_router_ip, args.sglang_router_port

    assert on_loopback(tmp_path, work, "--router-host", "127.0.0.1") == (None, None)
    host, port = on_loopback(tmp_path, work)
    assert host.startswith("127.") and port > 0
