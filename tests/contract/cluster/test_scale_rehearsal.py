"""`benchmarks/rehearsal.py` with few hosts: the real controller with simulated hosts, ranks and engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_a_rehearsal_loses_engines_and_trains_every_step(tmp_path: Path) -> None:
    """Law: every step ends with a weight sync, and each rank is called once for it and once for the batch."""
    out = tmp_path / "result.json"
    words = ["--gpus", "16", "--steps", "2", "--no-router", "--out", str(out)]
    done = subprocess.run([sys.executable, "-m", "benchmarks.rehearsal", *words], check=False, cwd=ROOT)
    assert done.returncode == 0
    (found,) = json.loads(out.read_text())["results"]
    assert (found["hosts"], found["ranks"], found["engines"]) == (2, 8, 4)
    assert len(found["steps"]) == 2 and "engine noticed" in found["recovery_s"]
    for step in found["steps"]:
        assert step["calls"]["train"] == 8 and step["calls"]["sync_weights"] % 8 == 0 < step["calls"]["sync_weights"]
        assert step["asked"]["/weights_checker"] >= step["ready_engines"] > 0
    assert {"weight sync", "admission", "supervisor"} <= found["step"]["parts"].keys()
