"""What a run has cost, by cause, counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.observability.report import summarize, summary_text
from slime.observability.report.summary import LOST, REPEATED, STARTING

HOUR = 3600.0
BEGIN_S = 1_767_603_600.0
"""2026-01-05 09:00 UTC."""


def row(step: int, hours: float, **times: float) -> dict[str, float]:
    """A row of timings that was logged this many hours after the first launch; each step took one hour."""
    named = {f"perf/{name}_time": value * HOUR for name, value in times.items()}
    return {"time": BEGIN_S + hours * HOUR, "rollout/step": step, "perf/step_time": HOUR, **named}


def test_every_hour_of_every_gpu_has_one_cause(tmp_path: Path) -> None:
    """Steps 0 to 2, a crash an hour and a half after step 2, a resume from step 1 that repeats step 2."""
    rows = [
        {**row(0, 1.5, rollout_wait=0.5, train=0.5), "startup/total_time": 0.5 * HOUR},
        row(1, 2.5, rollout_wait=0.5, train=0.25, save_model=0.25),
        row(2, 3.5, rollout_wait=0.5, train=0.5),
        {**row(2, 6.25, rollout_wait=0.25, train=0.5), "startup/total_time": 0.25 * HOUR},
        {"time": BEGIN_S + 2.0 * HOUR, "rollout/step": 2, "perf/engine_idle_ratio": 0.5, "rollout/raw_reward": 0.1},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    starts = [{"time": "2026-01-05T09:00:00+0000"}, {"time": "2026-01-05T14:00:00+0000"}]
    (tmp_path / "run.json").write_text(json.dumps({"starts": starts}))
    settings = {"device": "cuda", "actor_num_nodes": 1, "actor_num_gpus_per_node": 4, "rollout_num_gpus": 2}
    (tmp_path / "args.json").write_text(json.dumps(settings))
    summary = summarize(tmp_path)
    cost = summary.cost
    assert cost is not None and (cost.num_trainers, cost.num_engines, cost.num_gpus) == (4, 2, 6)
    hours = {
        STARTING: 0.75,
        "wait for batch": 1.25,
        "train": 1.25,
        "save": 0.25,
        "other": 0.25,
        REPEATED: 1.0,
        LOST: 1.5,
    }
    assert dict(cost.causes) == pytest.approx({cause: 6 * value for cause, value in hours.items()})
    assert cost.total == pytest.approx(6 * 6.25), "from the first launch to the last step"
    assert cost.idle_trainers == pytest.approx(4 * 1.75)
    assert cost.idle_engines == pytest.approx(2 * 2 * 0.5)
    assert "- cost: 37.5 GPU-hours of 6 (" in summary_text(summary)
    settings["colocate"] = True
    (tmp_path / "args.json").write_text(json.dumps(settings))
    shared = summarize(tmp_path).cost
    assert shared is not None and shared.num_gpus == 4
