"""Law 3 at the level of formulas, float64: every loss and aggregation, cut over data, tensor and context parallel ranks
and micro-batches. Pipeline stages and experts appear in no formula; the model's own test covers them.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training import free_port

ROOT = Path(__file__).parents[3]
TOLERANCE = 1e-6
"""Relative; loss, gradient norm and gradient."""

AGGREGATIONS = ("sequence_mean", "token_mean", "sequence_sum", "constant_length")
LOSSES: dict[str, dict[str, Any]] = {
    "clip": {"eps_clip_c": 3.0, "use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3"},
    "gspo": {"policy_loss": "gspo", "eps_clip": 0.02, "use_tis": True, "tis_level": "sequence", "entropy_coef": 0.1},
    "cispo": {"policy_loss": "cispo", "use_tis": True, "tis_mode": "mask", "use_kl_loss": True, "kl_loss_coef": 0.2,
              "kl_loss_type": "k2"},
    "sapo": {"policy_loss": "sapo", "rejection_level": "geometric", "rejection_low": 0.9, "rejection_high": 1.1},
    "rloo_opsm": {"advantage_estimator": "rloo", "use_opsm": True, "opsm_delta": 0.05, "kl_coef": 0.1},
    "reinforce_plus_plus": {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.9, "kl_coef": 0.1,
                            "use_tis": True, "tis_level": "geometric"},
    "baseline_distilled": {"advantage_estimator": "reinforce_plus_plus_baseline", "use_opd": True,
                           "opd_type": "megatron", "use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k1",
                           "use_unbiased_kl": True},
    "sft": {"loss_type": "sft_loss"},
    "values": {"advantage_estimator": "ppo", "gamma": 0.99, "lambd": 0.9},
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"sizes": [1, 1, 1], "args": {"micro_batch_size": 1}},
    "packed": {"sizes": [1, 1, 1], "args": {"micro_batch_size": 4}},
    "dp4": {"sizes": [4, 1, 1], "args": {"micro_batch_size": 1}},
    "dp2_tp2": {"sizes": [2, 2, 1], "args": {"micro_batch_size": 4}},
    "dp2_cp2": {"sizes": [2, 1, 2], "args": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 20}},
    "tp2_cp2": {"sizes": [1, 2, 2], "args": {"micro_batch_size": 1}},
    "dp4_balanced": {
        "sizes": [4, 1, 1],
        "args": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "balance_data": True},
    },
    "cp4": {"sizes": [1, 1, 4], "args": {"micro_batch_size": 4}},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four processes run every layout after the other."""
    out = tmp_path_factory.mktemp("formulas")
    cases = {
        f"{loss}/{aggregation}": {
            **settings,
            "loss_aggregation": aggregation,
            "use_dynamic_global_batch_size": True,
            "num_steps_per_rollout": 1,
        }
        for (loss, settings), aggregation in itertools.product(LOSSES.items(), AGGREGATIONS)
    }
    spec = {"port": free_port(), "world_size": 4, "out": str(out), "layouts": LAYOUTS, "cases": cases}
    (out / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.formula_worker", str(out / "spec.json")]
    running = []
    for rank in range(4):
        with (out / f"rank_{rank}.log").open("wb") as log:
            running.append(subprocess.Popen([*command, str(rank)], cwd=ROOT, stdout=log, stderr=log))
    try:
        codes = [p.wait(timeout=280) for p in running]
    finally:
        for p in running:
            p.kill()
    logs = "\n".join(f.read_text()[-3000:] for f in sorted(out.glob("*.log")))
    assert not any(codes), f"exit codes {codes}\n{logs}"
    loaded: dict[str, Any] = torch.load(out / "result.pt")
    return loaded


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradient_are_those_of_one_rank(results: dict[str, Any], loss: str) -> None:
    for layout, aggregation in itertools.product(LAYOUTS, AGGREGATIONS):
        want, got = results[f"one/{loss}/{aggregation}"], results[f"{layout}/{loss}/{aggregation}"]
        assert want["norm"] > 1e-4, f"{loss}/{aggregation}: a gradient of zero proves nothing"
        where = f"{layout}/{loss}/{aggregation}"
        assert got["loss"] == pytest.approx(want["loss"], rel=TOLERANCE, abs=1e-9), where
        assert got["norm"] == pytest.approx(want["norm"], rel=TOLERANCE), where
        assert float((got["gradient"] - want["gradient"]).norm()) <= TOLERANCE * want["norm"], where
        torch.testing.assert_close(got["sums"], want["sums"], rtol=TOLERANCE, atol=1e-9)


def test_aggregations_differ(results: dict[str, Any]) -> None:
    """Equal numbers would mean that the setting does nothing."""
    for loss in LOSSES:
        norms = {round(results[f"one/{loss}/{a}"]["norm"], 9) for a in AGGREGATIONS}
        assert len(norms) == len(AGGREGATIONS), f"{loss}: {norms}"
