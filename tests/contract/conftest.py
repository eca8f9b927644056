"""Shared real engines of the contract tests: one tiny SGLang server on the CPU and one router in front of it.

Both live for the whole pytest session and are made when a test first asks for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.serving.router import Router
from slime.serving.server import ServerSpec, SGLangServer
from tests.support.tiny import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random float32 Qwen3 checkpoint with its tokenizer. Do not write to it."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny-qwen3"), "qwen3")


@pytest.fixture(scope="session")
def engine_server(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    """A ready server in float32: `.url`, `.model_path`, `.pid`, `.alive`, `.log_tail()`.

    Tests share it: leave it running, not paused, and with the weights of `model_path`.
    """
    log_path = tmp_path_factory.mktemp("logs") / "engine.log"
    spec = ServerSpec(model_path=str(tiny_model_path), dtype="float32", token_versions=True)
    server = SGLangServer(spec, log_path=log_path)
    server.start()
    try:
        server.wait_ready(timeout_s=600)
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def router(engine_server: SGLangServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """A ready router with `engine_server` as its only worker: `.url`, `.workers()`."""
    front = Router(log_path=tmp_path_factory.mktemp("logs") / "router.log")
    front.start()
    try:
        front.wait_ready()
        front.add_worker(engine_server.url)
        yield front
    finally:
        front.stop()
