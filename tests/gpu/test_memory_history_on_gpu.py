"""The history of GPU memory: written after so many steps, and when memory runs out.

python -m pytest tests/gpu/test_memory_history_on_gpu.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slime.settings import parse_args
from slime.training.step.profiles import Profiles
from tests.support.command_line import complete

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_snapshots_are_written_after_so_many_steps_and_when_memory_runs_out(tmp_path: Path) -> None:
    words = ["--record-memory-history", "--memory-snapshot-num-steps", "2", "--device", "cuda", "--strict"]
    args = parse_args([*complete(tmp_path), *words])
    folder, device = Path(args.run_dir) / "memory", torch.device("cuda", 0)
    profiles = Profiles(args, 0, device)
    with pytest.raises(torch.OutOfMemoryError), profiles.step(0):
        torch.empty(1 << 50, device=device)
    assert [path.name for path in folder.iterdir()] == ["step_0_rank_0_snapshot.pickle"]
    for step in (1, 2, 3):
        with profiles.step(step):
            torch.ones(1 << 20, device=device)
    assert {path.name for path in folder.iterdir()} == {
        "step_0_rank_0_snapshot.pickle",
        "step_2_rank_0_snapshot.pickle",
    }
    assert all(path.stat().st_size > 1000 for path in folder.iterdir())
