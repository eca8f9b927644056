"""An engine that is gated takes no memory before its gate is open."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from slime.compat import sglang_memory_gate
from slime.serving.server import ServerSpec, SGLangServer, engine_phase


def test_who_comes_to_the_gate_waits_until_it_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = tmp_path / "gate"
    monkeypatch.setenv(sglang_memory_gate.GATE_ENV, str(gate))
    passed, waits = threading.Event(), threading.Event()
    monkeypatch.setattr(sglang_memory_gate.time, "sleep", lambda _: waits.set() or passed.wait(0.01))

    def come() -> None:
        sglang_memory_gate.wait("a runner")
        passed.set()

    with caplog.at_level("INFO", logger=sglang_memory_gate.__name__):
        visitor = threading.Thread(target=come, daemon=True)
        visitor.start()
        assert waits.wait(60) and not passed.is_set()
        gate.touch()
        visitor.join(60)
    assert passed.is_set()
    assert engine_phase(caplog.text) == "waiting for the trainer to lend the GPU"


def test_the_gate_of_a_killed_run_does_not_stand_open(tmp_path: Path) -> None:
    server = SGLangServer(ServerSpec("model", "float32", gated=True), log_path=tmp_path / "engine.log")
    server._gate.touch()
    server._set_gate()
    assert not server._gate.exists()
    server.open_gate()
    assert server._gate.exists()
    server._set_gate()
    assert server._gate.exists(), "a server that is started again goes through"
