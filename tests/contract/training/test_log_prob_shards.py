"""Log-probs, entropy, top-p set and gradients do not depend on how many gloo ranks the vocabulary is split over."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.log_prob_worker import SCENARIOS

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one, two and three ranks wrote."""
    out = tmp_path_factory.mktemp("log_prob_shards")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for world in (1, 2, 3):
        command = [sys.executable, "-m", "tests.support.log_prob_worker", str(out)]
        running = [subprocess.Popen([*command, str(r), str(world)], cwd=ROOT, env=environment) for r in range(world)]
        try:
            codes = [process.wait(timeout=100) for process in running]
        finally:
            for process in running:
                process.kill()
        assert not any(codes), f"exit codes {codes} with {world} ranks"
    return out


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", SCENARIOS)
def test_any_number_of_ranks_gives_the_numbers_of_one(folder: Path, name: str) -> None:
    one = torch.load(folder / f"{name}_1.pt")
    dtype = SCENARIOS[name].get("dtype", "float32")
    tolerance = {"float64": 1e-11, "float32": 1e-6, "bfloat16": 1e-6}[dtype]
    for world in (2, 3):
        many = torch.load(folder / f"{name}_{world}.pt")
        for key in ("log_probs", "entropy", "full"):
            torch.testing.assert_close(many[key], one[key], rtol=tolerance, atol=tolerance)
        assert torch.equal(many["outside"], one["outside"]), "the kept set depends on the number of ranks"
        limit = 2e-2 if dtype == "bfloat16" else 3 * tolerance  # half-precision gradients are rounded per rank
        for key in ("grad_hidden", "grad_weight"):
            torch.testing.assert_close(many[key], one[key], rtol=limit, atol=limit)
        assert not many["grad_padding"].any(), "padded rows have no gradient"
