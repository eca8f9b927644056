"""Every pair of placement and transport that docs/weight_sync.md says goes on a CPU, on one host, as a real run.

Pairs on several hosts are in `test_hosts.py`, those of engines that run already in `test_external_engines.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.test_loops import LOUDNESS, MAX_MISMATCH
from tests.support.e2e import Flags, started_and_finished
from tests.support.placements import PLACEMENTS, documented_pairs

pytestmark = pytest.mark.slow
STEPS = 3
SMALL = ["--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--num-rollout", str(STEPS), "--lr", "2e-2"]
HERE = ("decoupled", "colocated", "colocated, with additional engines")
PAIRS = sorted(pair for pair, devices in documented_pairs().items() if pair[0] in HERE and "cpu" in devices)


@pytest.mark.parametrize(("placement", "transport"), PAIRS)
def test_a_placement_with_a_transport(
    placement: str, transport: str, tmp_path: Path, digits: Callable[[Path], Flags], tiny_qwen3: Path
) -> None:
    """Law: engines serve what the trainer has, version by version, however both are placed and weights travel."""
    how = [*PLACEMENTS[placement], "--update-weight-transport", transport]
    run = started_and_finished(tmp_path / "run", [*digits(tiny_qwen3), *SMALL, *how])
    gaps = run.series("train", "train/train_rollout_logprob_abs_diff_max")
    assert len(gaps) == STEPS and max(gaps) <= LOUDNESS * MAX_MISMATCH, gaps
    assert run.series("rollout", "rollout/weight_version/min") == list(range(1, STEPS + 1))
    assert json.loads((run.run_dir / "args.json").read_text())["update_weight_transport"] == transport
    engines = 2 if "additional" in placement else 1
    assert len(list((run.run_dir / "logs").glob("engine_[0-9].log"))) == engines
    assert run.left() == []
