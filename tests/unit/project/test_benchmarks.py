"""The benchmark of the loops gives every mode the same work, and its figures are what they are called."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.asynchronous import LONGEST, PROMPTS, SAMPLES, SHORTEST, WARM_UP, length_of, measure, rewards, speeds
from benchmarks.peers.league import summary

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def test_lengths_belong_to_the_sample_and_have_a_heavy_tail() -> None:
    """Law: a sample's length depends on its id and the seed alone; few samples hold a large part of the tokens."""
    lengths = sorted(length_of(i, 1) for i in range(2000))
    assert lengths == sorted(length_of(i, 1) for i in reversed(range(2000)))
    assert lengths != sorted(length_of(i, 2) for i in range(2000))
    assert lengths[0] >= SHORTEST and lengths[-1] == LONGEST
    assert statistics.fmean(lengths) > 1.5 * statistics.median(lengths)
    assert sum(lengths[-200:]) > 0.35 * sum(lengths), "a tenth of the samples holds more than a third of the tokens"


def test_rates_are_of_the_time_after_the_warm_up() -> None:
    """Law: 1 s per step, 500 trained tokens and 600 sampled ones in each, whatever the warm-up took."""
    per_step = PROMPTS * SAMPLES
    steps = [
        {
            "trained_at": 100.0 * min(i, WARM_UP - 1) + max(i - WARM_UP + 1, 0),
            "rollout/response_tokens": 500.0,
            "rollout/staleness/max": 2.0,
            "rollout/staleness/mean": 1.0,
            "perf/train_time": 0.1,
            "perf/update_weights_time": 0.2,
            "rollout/raw_reward": 0.5,
            "eval/held_out": 0.75,
        }
        for i in range(WARM_UP + 4)
    ]
    requests = [{"time": 100.0 * (WARM_UP - 1) + 0.5 + i, "tokens": 600.0} for i in range(-3, 4)]
    figures = measure(steps, requests, seed=1)
    assert figures["samples_per_s"] == pytest.approx(per_step) and figures["seconds"] == 4.0
    assert figures["tokens_per_s"] == pytest.approx(500) and figures["sampled_per_s"] == pytest.approx(600)
    assert figures["trained_length"] == pytest.approx(500 / per_step) and figures["reward"] == 0.75
    other = {**figures, "samples_per_s": 2 * per_step, "reward": 0.70}
    both = {"sync": [figures, figures], "other": [other, other]}
    assert "2.00x (2.00-2.00)" in speeds(both) and "-0.050 ± 0.000" in rewards(both)


@pytest.mark.style
@pytest.mark.parametrize("file", sorted(RESULTS.glob("*h200*.json")), ids=lambda file: file.stem)
def test_figures_of_a_gpu_have_a_date(file: Path) -> None:
    """A rerun that forgets the date would pass for the earlier run."""
    dates = re.findall(r'"(?:date|when)": "(2\d{3}-\d\d-\d\d)', json.dumps(json.loads(file.read_text())))
    assert dates, f"{file.name} does not say when it was measured"


SPEC = {"prompts": 2, "samples": 4, "response": 100, "drop": 2}
STEPS: dict[str, list[dict[str, Any]]] = {
    "slime": [
        {"perf/rollout_time": 3.0},
        {"perf/step_time": 9.0, "perf/rollout_wait_time": 3.0, "perf/train_time": 4.0, "perf/update_weights_time": 0.5},
    ],
    "trl": [{"seconds": {"vLLM.generate": 3.0, "sync_weights": 0.5}, "first": {"vLLM.generate": 1005.0}}],
    "verl": [
        {
            "data": {
                "timing_s/step": 9.0,
                "timing_s/gen": 3.0,
                "timing_s/old_log_prob": 1.0,
                "timing_s/update_actor": 3.0,
                "timing_s/update_weights": 0.5,
            }
        }
    ],
}


@pytest.mark.parametrize("system", STEPS)
def test_systems_of_the_league_are_measured_alike(system: str) -> None:
    """Law: steps last from row to row, whatever a system says of itself; the first two, slow ones are left out."""
    ends = [1060.0, 1100.0, 1110.0, 1120.0, 1130.0]
    rows = [(end, row) for end in ends for row in STEPS[system]]
    found = summary(system, SPEC, rows, begin=1000.0)
    assert found["step_s"] == 10.0 and len(found["kept"]) == 3
    assert found["samples_per_s"] == pytest.approx(0.8) and found["tokens_per_s"] == pytest.approx(80)
    assert (found["generate_s"], found["sync_s"]) == (3.0, 0.5)
    assert found["train_s"] == {"slime": 4.0, "trl": 6.5, "verl": 4.0}[system]
    assert found["startup_s"] == {"slime": 60.0, "trl": 5.0, "verl": 54.0}[system]
