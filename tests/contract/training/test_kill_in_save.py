"""A save that is killed leaves the checkpoint before it, or itself: never anything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.training.save_and_kill import save_and_kill
from tests.support.ranks import Ranks
from tests.support.tiny import write_tiny_model


@pytest.mark.parametrize("num_kills", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_random_moments(num_kills: int, tmp_path: Path, ranks: Ranks) -> None:
    """Law: SIGKILL at a random moment of a save, sync or async: `latest` names a whole checkpoint of one moment."""
    model = write_tiny_model(tmp_path / "model", "qwen3", tied=True)
    (told,) = ranks.run(save_and_kill, 1, model, tmp_path, num_kills)
    for kind, counts in told.items():
        assert counts["kills"] == num_kills, kind
        assert counts["inside"] >= num_kills // 4, f"{kind}: too few kills hit a save: {counts}"
