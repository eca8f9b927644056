"""A save that is killed leaves the checkpoint before it, or itself: never anything else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny import write_tiny_model
from tests.support.training_ranks import ROOT


@pytest.mark.parametrize("num_kills", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_random_moments(num_kills: int, tmp_path: Path) -> None:
    """Law: SIGKILL at a random moment of a save, sync or async: `latest` names a whole checkpoint of one moment."""
    model = write_tiny_model(tmp_path / "model", "qwen3", tied=True)
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.save_worker", str(model), str(tmp_path)]
    done = subprocess.run(
        [*command, str(num_kills)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for kind, counts in json.loads((tmp_path / "result.json").read_text()).items():
        assert counts["kills"] == num_kills, kind
        assert counts["inside"] >= num_kills // 4, f"{kind}: too few kills hit a save: {counts}"
