"""Law 2 for a family that SGLang does not serve on a CPU: its own model class and loader make the table's tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.qwen_next import write_qwen_next
from tests.support.training import free_port

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_sglang_holds_what_the_table_says(tmp_path: Path, family: str, size: int) -> None:
    checkpoint = write_qwen_next(tmp_path / family, family, tied=family == "qwen3_5")
    config = checkpoint / "config.json"  # SGLang's Qwen3-Next keeps one norm in the dtype of the file, not of the flag
    config.write_text(config.read_text().replace('"float32"', '"bfloat16"'))
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.sglang_residents", str(checkpoint)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(port)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [p.communicate(timeout=240) for p in processes]
    finally:
        for p in processes:
            p.kill()
    for rank, (out, log) in enumerate(outputs):
        assert out, f"rank {rank} failed: {log[-2000:]}"
        found = json.loads(out.splitlines()[-1])
        assert len(found.pop("equal")) > 30, "too few tensors were compared"
        assert not any(found.values()), f"rank {rank} of {size}: {found}"
