"""A run as Prometheus and Grafana see it: its endpoint, those of its engines and router, and the dashboard."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slime.observability.prometheus import DASHBOARD
from slime.serving.leased_ports import lease_ports
from tests.support.e2e import Flags, RealRun

pytestmark = pytest.mark.slow

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
NAME = re.compile(r"(?:slime|sglang|smg)[_:][a-zA-Z0-9_:]+")
"""A metric in a query of the dashboard."""


def scraped(address: str, key: str) -> dict[str, list[Any]]:
    """Name of each sample -> the samples, as Prometheus' own parser for Python reads them."""
    asked = urllib.request.Request(f"http://{address}/metrics", headers={"Authorization": f"Bearer {key}"})
    text = OPENER.open(asked, timeout=30).read().decode()
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


@pytest.fixture(scope="module")
def watched(
    runs: Path, digits: Callable[[Path], Flags], tiny_qwen3: Path
) -> Iterator[tuple[RealRun, dict[str, dict[str, list[Any]]]]]:
    """A run that goes on, and what each of its parts said after three steps."""
    with lease_ports(1) as lease:
        port = lease.port
    task = digits(tiny_qwen3)
    flags: Flags = [*task, "--lr", "1e-3", "--num-rollout", "100000", "--metrics-port", "0"]
    held_out = f"{task[task.index('--prompt-data') + 1]}@[:8]"
    flags += ["--eval-prompt-data", "digits", held_out, "--eval-interval", "1"]
    with RealRun(runs / "prometheus", [*flags, "--router-port", str(port)]) as run:
        folder = run.run_dir / "prometheus"
        run.wait_until("step 2", lambda: "perf  step 2" in run.output)
        key = (folder / "key").read_text()
        targets = json.loads((folder / "targets.json").read_text())
        yield run, {one["labels"]["part"]: scraped(one["targets"][0], key) for one in targets}
        assert run.interrupt() == 130, run.tail
        assert json.loads((folder / "targets.json").read_text()) == [], "nothing is left to scrape"


def test_every_part_is_a_target_and_the_values_are_those_of_the_run(
    watched: tuple[RealRun, dict[str, dict[str, list[Any]]]],
) -> None:
    run, parts = watched
    assert parts.keys() == {"run", "engine", "router"}
    rows = run.metrics("train")
    (norm,) = parts["run"]["slime_train_grad_norm"]
    assert norm.value in [row["train/grad_norm"] for row in rows.values()]
    assert {s.labels["state"]: s.value for s in parts["run"]["slime_engines"]}["ready"] in (0.0, 1.0)
    assert [s.labels for s in parts["run"]["slime_engine_ready"]] == [{"engine": "0", "model": "default"}]
    assert any(sample.value > 0 for sample in parts["engine"]["sglang:generation_tokens_total"])


def test_only_who_has_the_key_reads_the_endpoint(watched: tuple[RealRun, dict[str, dict[str, list[Any]]]]) -> None:
    run, _ = watched
    targets = json.loads((run.run_dir / "prometheus" / "targets.json").read_text())
    (address,) = next(one["targets"] for one in targets if one["labels"]["part"] == "run")
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        with pytest.raises(urllib.error.HTTPError) as refused:
            OPENER.open(urllib.request.Request(f"http://{address}/metrics", headers=headers), timeout=30)
        assert refused.value.code == 401
    assert (run.run_dir / "prometheus" / "key").stat().st_mode & 0o077 == 0


def test_every_metric_of_the_dashboard_exists(watched: tuple[RealRun, dict[str, dict[str, list[Any]]]]) -> None:
    """Law: no panel is empty because of a name."""
    run, parts = watched
    known = set().union(*(found.keys() for found in parts.values()))
    board = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 25
    missing = {name for query in queries for name in NAME.findall(query)} - known
    assert missing == set(), f"{missing}; there are {sorted(known)}"
    assert json.loads((run.run_dir / "prometheus" / "dashboard.json").read_text()) == board
