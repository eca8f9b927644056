"""Weights change under running requests on the real engine, and each token is labelled with those that sampled it.

Odd and even versions are models in which a token has a log-prob that it cannot have in the other, so that it tells by
itself what sampled it (`tests.support.labelled_engine`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from slime.core.topology import ONE_RANK
from slime.rollout.client.call import Generation
from slime.rollout.client.engine_client import EngineClient
from slime.serving.control import HttpEngineControl
from slime.serving.server import ServerSpec, SGLangServer
from tests.support.engine_state import num_running
from tests.support.engines import serving
from tests.support.labelled_engine import labelled, log_prob
from tests.support.marks import quick
from tests.support.rollout import rollout_args

PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": True}


Models = tuple[Path, Path]
EVEN_AS, ODD_AS = 0, 8
"""The versions of `labelled` that all even and all odd versions are."""


@pytest.fixture(scope="module")
def models(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The models of even and of odd versions."""
    made = []
    for version in (EVEN_AS, ODD_AS):
        made.append(Path(shutil.copytree(tiny_model_path, tmp_path_factory.mktemp("models") / str(version))))
        tensors = load_file(made[-1] / "model.safetensors")
        save_file(labelled(tensors, version), made[-1] / "model.safetensors", metadata={"format": "pt"})
    return made[0], made[1]


class Updates:
    """Syncs versions of the weights to one engine as `weights.sync` does."""

    def __init__(self, url: str, models: Models) -> None:
        self._control, self._models = HttpEngineControl(url, ONE_RANK, 60.0), models

    def sync_weights(self, version: int, mode: str, model: Path | str | None = None) -> None:
        """`model`: of `version`, if it is another one."""
        model = model or self._models[version % 2]
        self._control.pause(mode)
        if mode == "abort":
            self._control.flush_cache()
        self._control.update_weights_from_disk(model_path=str(model), flush_cache=False, weight_version=version)
        self._control.resume()


class Streamed:
    """How many tokens the streams have got: says when to sync weights, however fast the machine is."""

    def __init__(self) -> None:
        self.num_tokens = 0

    async def reach(self, num_tokens: float, tasks: list[asyncio.Task[Generation]]) -> None:
        """Returns when streams have got as many. Raises what one of `tasks` does."""
        while self.num_tokens < num_tokens:
            await asyncio.sleep(0.01)
            for task in tasks:
                if task.done():
                    task.result()


async def generate(client: EngineClient, index: int, num_tokens: int, streamed: Streamed) -> Generation:
    """One answer: every fifth as a stream, whose parts are put together."""
    prompt, params = [2, *range(40, 42 + index % 30)], {**PARAMS, "max_new_tokens": num_tokens}
    if index % 5:
        return await client.generate(prompt, params)
    parts = []
    async for part in client.stream(prompt, params):
        parts.append(part)
        streamed.num_tokens += len(part.tokens)
    assert {p.finish_reason for p in parts[:-1]} == {"abort"} and len(parts) > 5, "it did not stream"
    names = ("tokens", "log_probs", "weight_version")
    whole: dict[str, Any] = {name: tuple(x for part in parts for x in getattr(part, name)) for name in names}
    return dataclasses.replace(parts[-1], **whole)


async def work(
    url: str, updates: Updates, mode: str, *, num_requests: int, num_tokens: int, last: int
) -> list[Generation]:
    """Requests of several lengths, and weight syncs of version 2 to `last` meanwhile.

    Few enough to run at once (64, and so many tokens as fit): one that waits for another sees no weight sync.
    """
    client, streamed = EngineClient(url, request_timeout_s=240, token_versions=True), Streamed()
    try:
        lengths = [num_tokens - i % 7 for i in range(num_requests)]
        tasks = [asyncio.create_task(generate(client, i, n, streamed)) for i, n in enumerate(lengths)]
        for version in range(2, last + 1):
            await streamed.reach(sum(lengths[::5]) * (version - 1) / (last + 1), tasks)
            await asyncio.to_thread(updates.sync_weights, version, mode)
        results = await asyncio.gather(*tasks)
        assert [len(r.tokens) for r in results] == lengths
        return results
    finally:
        await client.close()


def lived_through(
    url: str, updates: Updates, mode: str, *, num_tokens: tuple[int, ...], last: int, at_least: int
) -> list[Generation]:
    """The answers of 60 requests, of which so many lived through a weight sync, all labelled rightly.

    How long an answer must be for that depends on the machine: the engine goes on while this process waits for a core.
    """
    for num in num_tokens:
        updates.sync_weights(1, "abort")
        results = asyncio.run(work(url, updates, mode, num_requests=60, num_tokens=num, last=last))
        if check(results) >= at_least:
            return results
    raise AssertionError(f"too few requests lived through a weight sync, even with {num_tokens[-1]} tokens")


def check(results: list[Generation]) -> int:
    """No token has the label of other weights. Returns how many requests lived through a weight sync."""
    for result in results:
        labels: Any = result.weight_version
        assert result.finish_reason == "length" and list(labels) == sorted(labels), "versions go up"
        told = zip(result.tokens, result.log_probs, labels, strict=True)
        wrong = [i for i, (token, p, v) in enumerate(told) if abs(p - log_prob(token, (EVEN_AS, ODD_AS)[v % 2])) > 1e-5]
        assert not wrong, f"tokens {wrong} of {len(labels)} have the label of other weights"
    return sum(len(set(r.weight_version)) > 1 for r in results)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", quick(["retract", "in_place"], "retract"))
def test_each_token_is_labelled_with_the_weights_that_sampled_it(
    mode: str, engine_server: SGLangServer, models: Models
) -> None:
    updates = Updates(engine_server.url, models)
    try:
        lived_through(engine_server.url, updates, mode, num_tokens=(60, 240, 900), last=4, at_least=40)
    finally:
        updates.sync_weights(1, "abort", engine_server.model_path)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_prefix_is_cached_for_the_version_that_read_it(
    mode: str, engine_server: SGLangServer, models: Models
) -> None:
    """Law: samples of a prompt share its prefix under one version; none gets one that other weights have read, though
    a request lives through the weight sync and nothing is flushed.
    """
    updates, prompt = Updates(engine_server.url, models), [3, *range(30, 90)]
    long, short = {**PARAMS, "max_new_tokens": 900}, {**PARAMS, "max_new_tokens": 2}

    async def main() -> tuple[list[list[int]], set[int]]:
        client, streamed = EngineClient(engine_server.url, token_versions=True), Streamed()
        try:
            one = asyncio.create_task(generate(client, 0, long["max_new_tokens"], streamed))
            await streamed.reach(20, [one])
            cached = []
            for version in (2, 3, 4):
                await asyncio.to_thread(updates.sync_weights, version, mode)
                answers = [await client.generate(prompt, short) for _ in range(3)]
                assert {v for a in answers for v in versions_of(a)} == {version}
                cached.append([a.cached_tokens for a in answers])
            return cached, versions_of(await one)
        finally:
            await client.close()

    try:
        updates.sync_weights(1, "abort")
        cached, lived = asyncio.run(main())
        assert len(lived) > 1, "no request lived through a weight sync"
        assert [first for first, *_ in cached] == [0, 0, 0], f"prefixes of other weights: {cached}"
        assert all(again >= len(prompt) - 8 for _, *more in cached for again in more), cached
    finally:
        updates.sync_weights(1, "abort", engine_server.model_path)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_weights_of_one_number_share_no_prefix(mode: str, engine_server: SGLangServer, models: Models) -> None:
    """Law: no two sets of weights share what was cached, whatever they are called. An engine outlives a run, whose
    successor counts from 1 again, and a resumed run uses numbers again that a crash has cut off.
    """
    updates, prompt = Updates(engine_server.url, models), [4, *range(90, 30, -1)]

    async def main() -> list[list[int]]:
        client = EngineClient(engine_server.url, token_versions=True)
        try:
            cached = []
            for model in models:
                await asyncio.to_thread(updates.sync_weights, 1, mode, model)
                answers = [await client.generate(prompt, {**PARAMS, "max_new_tokens": 2}) for _ in range(2)]
                assert {v for a in answers for v in versions_of(a)} == {1}
                cached.append([a.cached_tokens for a in answers])
            return cached
        finally:
            await client.close()

    try:
        cached = asyncio.run(main())
        assert [first for first, _ in cached] == [0, 0], f"prefixes of other weights: {cached}"
        assert all(again >= len(prompt) - 8 for _, again in cached), cached
    finally:
        updates.sync_weights(1, "abort", engine_server.model_path)


def versions_of(answer: Generation) -> set[int]:
    """Of its tokens."""
    versions = answer.weight_version
    return {versions} if isinstance(versions, int) else set(versions)


def test_leaving_a_stream_ends_the_request_in_the_engine(engine_server: SGLangServer) -> None:
    """A stream that is as long, and was opened before, goes on when the engine has nothing else to do."""
    long = {**PARAMS, "max_new_tokens": 900}

    async def main() -> int:
        client = EngineClient(engine_server.url)
        try:
            async with aclosing(client.stream([2, 41], long)) as other:
                seen = len((await anext(other)).tokens)
                async with aclosing(client.stream([2, 40], long)) as left:
                    await anext(left)
                await client.drain()
                async for part in other:
                    seen += len(part.tokens)
                    if await asyncio.to_thread(num_running, engine_server.url) == 1:
                        break
            return seen
        finally:
            await client.close()

    assert asyncio.run(main()) < 900, "the stream that was left went on to its end"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["retract", "in_place"])
@pytest.mark.parametrize("more", [[], ["--sglang-disable-overlap-schedule"]])
def test_labels_are_exact_on_the_engine_of_a_run(
    mode: str, more: list[str], tiny_model_path: Path, models: Models, tmp_path: Path
) -> None:
    (tmp_path / "model").symlink_to(tiny_model_path)
    flags = ["--fully-async", "--pause-generation-mode", mode, "--no-bf16", *more]
    spec = ServerSpec.from_args(rollout_args(tmp_path, *flags, synchronous=False))
    assert spec.token_versions and "disable_radix_cache" not in spec.extra
    with serving(spec, tmp_path) as server:
        updates = Updates(server.url, models)
        results = lived_through(server.url, updates, mode, num_tokens=(240, 900), last=12, at_least=50)
        versions = Counter(v for r in results for v in r.weight_version)  # type: ignore[union-attr]
        print(f"{versions.total()} tokens of {len(versions)} versions: {versions}")
