"""The rollout against the real engine: what it answers is what the client and the loop rely on."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.core.errors import RequestRejected
from slime.rollout.client.engine_client import REQUEST_SCOPE, EngineClient, RequestScope
from slime.rollout.client.teacher_client import TeacherClient
from slime.rollout.manager import RolloutManager
from tests.contract.rollout.verdict_hooks import TRAINED
from tests.support.engine_state import noting_requests, num_running
from tests.support.rollout import READ, SAMPLED, SAMPLING_FLAGS, SEED, rollout_args, write_prompts
from tests.support.tiny import VOCAB_SIZE

PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 64, "skip_special_tokens": False}
PROMPT = [2, 40, 41, 42]
EOS = 1


def runs_on(engine_server: Any) -> bool:
    """Whether requests are left in the engine; what has just ended is counted until its scheduler's next turn."""
    until = time.monotonic() + 20.0  # on a busy machine a turn takes seconds
    while time.monotonic() < until:
        if not num_running(engine_server.url):
            return False
        time.sleep(0.05)
    return True


async def until_sampled(client: EngineClient) -> None:
    """Returns when requests that were sent before have got some tokens: a later one has."""
    async with aclosing(client.stream(PROMPT, {**PARAMS, "max_new_tokens": 900, "ignore_eos": True})) as parts:
        seen = 0
        async for part in parts:
            seen += len(part.tokens)
            if seen >= 10:
                return


def with_client(url: str, work: Callable[[EngineClient], Awaitable[Any]], **settings: Any) -> Any:
    async def main() -> Any:
        client = EngineClient(url, request_timeout_s=60, **settings)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(main())


def test_trained_ids_are_the_sampled_ones_and_hold_the_end_token(front: Any) -> None:
    async def work(client: EngineClient) -> Any:
        return await asyncio.gather(*(client.generate(PROMPT, PARAMS) for _ in range(40)))

    results = with_client(front.url, work)
    ended = [r for r in results if r.finish_reason == "stop"]
    assert ended, "no sample of 40 ended by itself"
    for r in results:
        assert len(r.tokens) == len(r.log_probs) and r.weight_version == 1 and r.prompt_tokens == len(PROMPT)
        assert EOS not in r.tokens[:-1]
        if r.finish_reason == "length":  # an end token may be the last one allowed: then it is part of the text, too
            assert len(r.tokens) == 64
        else:
            assert r.tokens[-1] == EOS and not r.text.endswith("<eos>")


def test_stop_strings_and_stop_tokens_are_in_the_ids(front: Any) -> None:
    async def work(client: EngineClient) -> Any:
        tokens = client.generate(PROMPT, {**PARAMS, "stop_token_ids": list(range(60, 90)), "max_new_tokens": 400})
        strings = client.generate(PROMPT, {**PARAMS, "stop": list("abcdefghijklm"), "max_new_tokens": 400})
        return await asyncio.gather(tokens, strings)

    by_token, by_string = with_client(front.url, work)
    assert by_token.finish_reason == "stop" and (60 <= by_token.tokens[-1] < 90 or by_token.tokens[-1] == EOS)
    assert by_string.finish_reason == "stop"
    assert by_string.text[-1:] in "abcdefghijklm" or by_string.tokens[-1] == EOS


def test_a_prompt_beyond_the_context_is_refused_at_once(front: Any) -> None:
    async def work(client: EngineClient) -> None:
        with pytest.raises(RequestRejected, match="context length"):
            await client.generate([2] * 2000, PARAMS)

    with_client(front.url, work)


def test_a_cancelled_request_leaves_the_engine(front: Any, engine_server: Any) -> None:
    """A request that is as long, and was sent before those that are cancelled, runs on alone."""

    async def work(client: EngineClient) -> None:
        long = {**PARAMS, "max_new_tokens": 900, "ignore_eos": True}
        other, *tasks = [asyncio.create_task(client.generate(PROMPT, long)) for _ in range(5)]
        await until_sampled(client)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.drain()
        while not other.done() and await asyncio.to_thread(num_running, engine_server.url) != 1:
            pass
        assert not other.done(), "cancelled requests ran to their ends"
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)

    with_client(front.url, work)


def test_an_aborted_scope_returns_partial_tokens_that_can_be_continued(front: Any) -> None:
    async def work(client: EngineClient) -> None:
        scope = RequestScope()
        REQUEST_SCOPE.set(scope)
        long = {**PARAMS, "max_new_tokens": 900, "ignore_eos": True}
        task = asyncio.create_task(client.generate(PROMPT, long, returns_partial=True))
        REQUEST_SCOPE.set(None)
        await until_sampled(client)
        await client.abort_scope(scope)
        partial = await task
        assert partial.finish_reason == "abort" and 0 < len(partial.tokens) == len(partial.log_probs) < 900
        rest = await client.generate([*PROMPT, *partial.tokens], {**long, "max_new_tokens": 5})
        assert len(rest.tokens) == 5 and rest.prompt_tokens == len(PROMPT) + len(partial.tokens)

    with_client(front.url, work)


def test_the_engine_itself_says_what_the_settings_ask_for(engine_server: Any, front: Any, tmp_path: Path) -> None:
    """Law: each setting of sampling arrives, of training, of all evaluations, and of one dataset in place of those."""
    held = write_prompts(tmp_path / "held.jsonl", 2)
    own = {"temperature": 0.1, "top_p": 0.2, "top_k": 3, "min_new_tokens": 1, "repetition_penalty": 1.5}
    file = tmp_path / "eval.yaml"
    entry = {"path": str(held), **own, "max_response_len": 2, "n_samples_per_eval_prompt": 2}
    file.write_text(json.dumps({"eval": {"datasets": {"plain": {"path": str(held)}, "own": entry}}}))
    flags = ("--eval-temperature", "0.7", "--eval-top-p", "0.6", "--eval-top-k", "30", "--eval-max-response-len", "6")
    model = ("--hf-checkpoint", str(engine_server.model_path))
    args = rollout_args(tmp_path, *SAMPLING_FLAGS, *flags, *model, "--eval-interval", "1", "--eval-config", str(file))

    async def work() -> None:
        manager = RolloutManager(args, engines=[front.url])
        try:
            await manager.generate(0)
            await manager.evaluate(0)
        finally:
            await manager.close()

    with noting_requests(engine_server) as received:
        asyncio.run(work())
        asked = [one["sampling_params"] for one in received()]
    evaluated = {"temperature": 0.7, "top_p": 0.6, "top_k": 30, "max_new_tokens": 6}
    for one in asked:
        del one["stream_interval"], one["no_stop_trim"]
    assert len(asked) == 8 + 2 + 4
    for index in range(8):
        assert SAMPLED | READ | {"sampling_seed": SEED + index} in asked
    for index in range(2):
        assert evaluated | READ | {"sampling_seed": (SEED - 1 - index) % 2**31} in asked
    for index in range(2, 6):
        assert own | READ | {"max_new_tokens": 2, "sampling_seed": (SEED - 1 - index) % 2**31} in asked


def test_steps_and_evaluation_through_the_router(front: Any, engine_server: Any, tmp_path: Path) -> None:
    held_out = write_prompts(tmp_path / "held.jsonl", 40)
    flags = (
        "--hf-checkpoint",
        str(engine_server.model_path),
        "--over-sampling-batch-size",
        "8",
        "--partial-rollout",
        "--rollout-max-response-len",
        "48",
        "--eval-interval",
        "1",
        "--eval-temperature",
        "0",
        "--eval-prompt-data",
        "held",
        str(held_out),
    )
    args = rollout_args(tmp_path, *flags)

    async def work() -> None:
        manager = RolloutManager(args, engines=[front.url])
        try:
            seen: set[int] = set()
            for step in range(3):
                batch, metrics = await manager.generate(step)
                assert not runs_on(engine_server), "a request outlived its rollout"
                groups = {s.group_index for s in batch.samples}
                assert len(groups) == 4 and not groups & seen
                seen |= groups
                assert all(s.response_length <= 48 for s in batch.samples)
                assert metrics["rollout/weight_version/max"] == 1.0
                manager.commit(step)
            metrics = await manager.evaluate(3)
            assert metrics["eval/held-num_prompts"] == 40 and metrics["eval/weight_version"] == 1.0
        finally:
            await manager.close()

    asyncio.run(work())


def test_what_was_sampled_behind_other_ids_is_left_out_alone(front: Any, engine_server: Any, tmp_path: Path) -> None:
    """Law 1, on a plugin that posts text. What is trained has the log-probs that the engine gives these very ids when
    it reads them as a prompt; a sample of which that is not so trains nothing and says why; the step goes on.
    """
    plugin = ("--custom-generate-function-path", "tests.support.public_plugin.generate_by_text")
    own = ("--hf-checkpoint", str(engine_server.model_path), "--n-samples-per-prompt", "8", *plugin)
    args = rollout_args(tmp_path, *own, "--rollout-sample-filter-path", "tests.contract.rollout.verdict_hooks.noted")
    host, port = front.url.removeprefix("http://").split(":")
    args = args.replace(sglang_router_ip=host, sglang_router_port=int(port))  # where a run has its router
    TRAINED.clear()

    async def work() -> None:
        manager, teacher = RolloutManager(args, engines=[front.url]), TeacherClient(front.url, vocab_size=VOCAB_SIZE)
        try:
            batch, metrics = await manager.generate(0)
            left_out = [sample for sample in TRAINED if sample.reward is None]
            assert [sample.index % 4 for sample in left_out] == [0] * 8 and len(TRAINED) == 32
            assert metrics["rollout/num_unscored_samples"] == 8
            for sample in left_out:
                assert re.search(r"token \d+ of the sample is id 78, but the engine had id 80 there", sample.unscored)
            for sample, frozen in zip(sorted(TRAINED, key=lambda s: s.index), batch.samples, strict=True):
                read = await teacher.log_probs(frozen.tokens.tolist(), frozen.response_length)
                off = float(np.abs(np.asarray(read) - frozen.rollout_log_probs).max())
                assert off < 1e-5 if sample.reward is not None else np.isnan(frozen.reward)
        finally:
            await teacher.close()
            await manager.close()

    asyncio.run(work())
