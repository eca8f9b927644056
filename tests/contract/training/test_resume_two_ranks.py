"""Law 7 with two ranks: killed and resumed equals not stopping, bit for bit, sharded optimizer state included."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.training import free_port

ROOT = Path(__file__).parents[3]


def _run(folder: Path, checkpoint: Path, megatron: dict[str, Any], **spec: Any) -> dict[str, Any]:
    folder.mkdir()
    out = {
        "checkpoint": str(checkpoint),
        "world_size": 2,
        "port": free_port(),
        "out": str(folder),
        "megatron": megatron,
    }
    (folder / "spec.json").write_text(json.dumps({**out, "scenarios": {}, **spec}))
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.training_worker", str(folder / "spec.json")]
    logs = [folder / f"rank_{rank}.log" for rank in range(2)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("wb") as file:
            processes.append(subprocess.Popen([*command, str(rank)], cwd=ROOT, stdout=file, stderr=file))
    try:
        codes = [p.wait(timeout=120) for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert not any(codes), "\n".join(log.read_text()[-3000:] for log in logs)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


@pytest.mark.slow
@pytest.mark.parametrize("megatron", [{}, {"tensor_model_parallel_size": 2}], ids=["dp2", "tp2"])
def test_resumed_ranks_end_with_the_same_files(megatron: dict[str, Any], tmp_path: Path, tiny_qwen3: Path) -> None:
    whole = _run(tmp_path / "whole", tiny_qwen3, megatron, rounds=3, save_after=2)
    middle = tmp_path / "whole" / "after_2"
    resumed = _run(tmp_path / "resumed", tiny_qwen3, megatron, rounds=1, load=str(middle))
    assert resumed["metrics"] == whole["metrics"][2:]
    for file in sorted((tmp_path / "whole" / "end").iterdir()):
        assert file.read_bytes() == (tmp_path / "resumed" / "end" / file.name).read_bytes(), file.name
