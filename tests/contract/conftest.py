"""Shared real engines of the contract tests: one tiny SGLang server on the CPU and one router in front of it.

Both live for the whole pytest session and are made when a test first asks for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.serving.router import Router
from slime.serving.server import SGLangServer
from tests.support.engines import fronting, serving, spec_of
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
    with serving(spec_of(tiny_model_path, token_versions=True), tmp_path_factory.mktemp("engine")) as server:
        yield server


@pytest.fixture(scope="session")
def router(engine_server: SGLangServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """A ready router with `engine_server` as its only worker: `.url`, `.workers()`."""
    with fronting(engine_server.url, tmp_path_factory.mktemp("router")) as front:
        yield front
