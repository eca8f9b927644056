"""Weights change under running requests on the real engine, and each token is labelled with those that sampled it.

Odd versions are a random model, even ones have an output layer of zeros: there each log-prob is exactly
-ln(vocabulary), so that a token tells by itself what sampled it.
"""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.rollout.streaming import StreamingClient
from slime.serving.control import HttpEngineControl
from slime.serving.router import Router
from slime.serving.server import ServerSpec, SGLangServer
from tests.support.tiny import VOCAB_SIZE, write_tiny_model

UNIFORM = -math.log(VOCAB_SIZE)
PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 300, "ignore_eos": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The models of odd and of even versions."""
    folder = tmp_path_factory.mktemp("models")
    odd = write_tiny_model(folder / "odd", "qwen3")
    even = Path(shutil.copytree(odd, folder / "even"))
    tensors = load_file(even / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros_like(tensors["lm_head.weight"])
    save_file(tensors, even / "model.safetensors", metadata={"format": "pt"})
    return odd, even


@pytest.fixture(scope="module")
def engine(
    models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[SGLangServer, Router]]:
    """An engine as `--pause-generation-mode retract` starts it, behind a router."""
    logs = tmp_path_factory.mktemp("logs")
    settings = dict.fromkeys(("disable_overlap_schedule", "disable_radix_cache", "incremental_streaming_output"), True)
    server = SGLangServer(
        ServerSpec(model_path=str(models[0]), dtype="float32", extra=settings), log_path=logs / "engine.log"
    )
    front = Router(log_path=logs / "router.log")
    server.start()
    front.start()
    try:
        server.wait_ready(timeout_s=300)
        front.wait_ready()
        front.add_worker(server.url)
        yield server, front
    finally:
        front.stop()
        server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_each_token_is_labelled_with_the_weights_that_sampled_it(
    mode: str, models: tuple[Path, Path], engine: tuple[SGLangServer, Router]
) -> None:
    server, front = engine
    control = HttpEngineControl(server.url, 1, 60.0)

    def publish(version: int) -> None:
        control.pause(mode)
        model = models[version % 2 == 0]
        control.update_weights_from_disk(model_path=str(model), flush_cache=False, weight_version=version)
        control.resume()

    async def work() -> list[Any]:
        client = StreamingClient(front.url, request_timeout_s=120)
        try:
            tasks = [asyncio.create_task(client.generate([2, 40, 41, 42], PARAMS)) for _ in range(6)]
            for version in (2, 3, 4):
                await asyncio.sleep(0.4)
                await asyncio.to_thread(publish, version)
            return await asyncio.gather(*tasks)
        finally:
            await client.close()

    publish(1)
    results = asyncio.run(work())
    assert any(isinstance(r.weight_version, tuple) for r in results), "no request lived through a publication"
    for result in results:
        assert len(result.tokens) == 300 and result.finish_reason == "length" and len(result.text) >= 0, result
        labels = result.weight_version
        labels = labels if isinstance(labels, tuple) else (labels,) * len(result.tokens)
        assert list(labels) == sorted(labels), "versions go up"
        wrong = [i for i, (p, v) in enumerate(zip(result.log_probs, labels, strict=True))
                 if (abs(p - UNIFORM) < 2e-6) != (v % 2 == 0)]  # fmt: skip
        assert not wrong, f"tokens {wrong} of 300 have the label of other weights"
