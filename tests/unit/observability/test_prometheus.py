"""What Prometheus sees of a run, by its own parser; and the files that tell it where to look."""

from __future__ import annotations

import json
import math
import re
import urllib.request
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from slime.core.errors import ConfigError
from slime.observability.prometheus import DASHBOARD, PrometheusSink, Target, exposed_name
from slime.observability.sinks import StepRecord

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def scrape(sink: PrometheusSink) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    key = (sink.folder / "key").read_text()
    asked = urllib.request.Request(f"http://{sink.address}/metrics", headers={"Authorization": f"Bearer {key}"})
    text = OPENER.open(asked, timeout=10).read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_newest_value_of_each_metric_is_served_under_one_name(tmp_path: Path) -> None:
    sink = PrometheusSink(tmp_path, run_id="r", host="127.0.0.1", port=0)
    try:
        for step, loss in enumerate((0.5, 0.25, math.nan)):
            sink.write(StepRecord("train", step, {"train/loss": loss, "data/failed/timed out": 2.0 + step}))
        sink.write(StepRecord("eval", 2, {"eval/aime-24": 0.75, "eval/aime-24-pass@8": 0.9}))
        sink.count_alert("hang")
        found = scrape(sink)
    finally:
        sink.close()
    assert math.isnan(found["slime_train_loss", ()])
    assert found["slime_data_failed_by_reason", (("reason", "timed out"),)] == 4.0
    assert found["slime_eval_score", (("dataset", "aime-24"),)] == 0.75
    assert found["slime_eval_aime_24_pass_8", ()] == 0.9
    assert found["slime_step", (("kind", "train"),)] == 2.0
    assert found["slime_alerts_total", (("kind", "hang"),)] == 1.0
    assert found["slime_hangs_total", ()] == 0.0


def test_targets_follow_the_engines_and_are_empty_after_the_run(tmp_path: Path) -> None:
    (tmp_path / "run-a").mkdir()
    sink = PrometheusSink(tmp_path / "run-a", run_id="r", host="127.0.0.1", port=0)
    file = sink.folder / "targets.json"
    sink.set_scraped([Target("10.0.0.2:30000", "engine", {"engine": "0", "model": "default"})])
    own, engine = json.loads(file.read_text())
    assert own == {"targets": [sink.address], "labels": {"run": "run-a", "run_id": "r", "part": "run"}}
    assert engine["targets"] == ["10.0.0.2:30000"]
    assert engine["labels"] == {"run": "run-a", "run_id": "r", "part": "engine", "engine": "0", "model": "default"}
    job = yaml.safe_load((sink.folder / "scrape.yaml").read_text())["scrape_configs"][0]
    assert job["file_sd_configs"] == [{"files": [str(file)]}]
    assert Path(job["authorization"]["credentials_file"]).read_text()
    sink.close()
    assert json.loads(file.read_text()) == []


def test_a_port_in_use_is_refused_with_the_flag(tmp_path: Path) -> None:
    sink = PrometheusSink(tmp_path, run_id="r", host="127.0.0.1", port=0)
    try:
        with pytest.raises(ConfigError, match=f"--metrics-port {sink.port} cannot be opened on 127.0.0.1"):
            PrometheusSink(tmp_path, run_id="r", host="127.0.0.1", port=sink.port)
    finally:
        sink.close()


def test_names_are_valid_and_tell_metrics_apart() -> None:
    valid = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
    names = {
        exposed_name(metric) for metric in ("rollout/raw_reward", "passrate/pass@4", "perf/engine_queue/3", "eval/x")
    }
    assert len(names) == 4 and all(valid.fullmatch(name) for name, _ in names)


def test_the_dashboard_has_a_query_in_every_panel_and_places_for_all() -> None:
    board = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    places = [tuple(panel["gridPos"][key] for key in "xywh") for panel in board["panels"]]
    assert len(set(places)) == len(places) and all(x + w <= 24 for x, _, w, _ in places)
    for panel in panels:
        assert panel["targets"] and panel["title"], panel
        for target in panel["targets"]:
            assert target["expr"].count('run=~"$run"') == 1 and target["expr"].count("(") == target["expr"].count(")")
