"""A run as Prometheus and Grafana see it: its endpoint, those of its engines and router, and the dashboard."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slime.observability.prometheus import DASHBOARD
from slime.serving.leased_ports import lease_ports
from tests.support.e2e import WITH_ITS_PARENT, Flags, RealRun

pytestmark = pytest.mark.slow

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
NAME = re.compile(r"(?:slime|sglang|smg)[_:][a-zA-Z0-9_:]+")
"""A metric in a query of the dashboard."""
PROGRAMS = [shutil.which(name) for name in ("prometheus", "promtool")]
NO_PROMETHEUS = pytest.mark.skipif(None in PROGRAMS, reason="prometheus is not installed (Debian: prometheus)")
ANSWER_LIMIT_S = 120.0


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
    missing = {name for query in queries for name in NAME.findall(query.replace("[:_]", ":"))} - known
    assert missing == set(), f"{missing}; there are {sorted(known)}"
    assert json.loads((run.run_dir / "prometheus" / "dashboard.json").read_text()) == board


def panels() -> list[tuple[str, str]]:
    """(title, query) of everything that the dashboard draws."""
    board = json.loads(DASHBOARD.read_text())
    return [(panel["title"], one["expr"]) for panel in board["panels"] for one in panel.get("targets", ())]


@contextmanager
def server(folder: Path, scrape: Path) -> Iterator[str]:
    """URL of a Prometheus server with the run's scrape job, and with an interval that suits a test."""
    config = folder / "prometheus.yml"
    config.write_text(f"global: {{scrape_interval: 1s}}\n{scrape.read_text()}")
    subprocess.run([str(PROGRAMS[1]), "check", "config", str(config)], check=True, capture_output=True)
    with lease_ports(1) as lease:
        address = f"127.0.0.1:{lease.port}"
    words = [str(PROGRAMS[0]), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as log:
        listening = f"--web.listen-address={address}"
        process = subprocess.Popen([*WITH_ITS_PARENT, *words, listening], stdout=log, stderr=log)
    try:
        yield f"http://{address}"
    finally:
        process.kill()
        process.wait()


def answer(url: str, path: str, **query: str | float) -> Any:
    """What the server's API answers; None while it does not."""
    try:
        with OPENER.open(f"{url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=30) as response:
            return json.load(response)["data"]
    except (urllib.error.URLError, ConnectionError):
        return None


@NO_PROMETHEUS
def test_a_prometheus_server_reads_every_part_and_each_query_of_the_dashboard_has_data(
    watched: tuple[RealRun, dict[str, dict[str, list[Any]]]], tmp_path: Path
) -> None:
    """Law: with the run's own scrape job, all targets are up, no query is empty, and the values are the run's."""
    run, parts = watched
    name = run.run_dir.name
    with server(tmp_path, run.run_dir / "prometheus" / "scrape.yaml") as url:

        def empty() -> list[str]:
            asked = {f"{title}: {query}": query.replace("$run", name) for title, query in panels()}
            return [
                what for what, query in asked.items() if not (answer(url, "query", query=query) or {}).get("result")
            ]

        until_s = time.monotonic() + ANSWER_LIMIT_S
        while (without_data := empty()) and time.monotonic() < until_s:
            time.sleep(1.0)
        targets = answer(url, "targets", state="active")["activeTargets"]
        assert {(one["labels"]["part"], one["health"], one["lastError"]) for one in targets} == {
            (part, "up", "") for part in parts
        }
        assert without_data == [], (tmp_path / "log").read_text()[-2000:]
        found = answer(url, "query", query=f'slime_train_grad_norm{{run="{name}"}}[1h]')["result"]
        seen = {float(value) for series in found for _, value in series["values"]}
    logged = set(run.series("train", "train/grad_norm"))
    assert seen and seen <= logged, f"{seen - logged} were never logged"


@NO_PROMETHEUS
def test_promtool_complains_about_names_in_seconds_alone(
    watched: tuple[RealRun, dict[str, dict[str, list[Any]]]],
) -> None:
    """Law: names, types and help follow Prometheus' rules, but for `sec`, as some names in `metrics.jsonl` end."""
    run, _ = watched
    folder = run.run_dir / "prometheus"
    (address,) = next(
        one["targets"] for one in json.loads((folder / "targets.json").read_text()) if one["labels"]["part"] == "run"
    )
    key = {"Authorization": f"Bearer {(folder / 'key').read_text()}"}
    text = OPENER.open(urllib.request.Request(f"http://{address}/metrics", headers=key), timeout=30).read()
    done = subprocess.run([str(PROGRAMS[1]), "check", "metrics"], input=text, capture_output=True, check=False)
    said = (done.stdout + done.stderr).decode().splitlines()
    other = [line for line in said if not re.fullmatch(r"slime_perf_\w+_sec metric names should not .* units", line)]
    assert done.returncode in (0, 3) and other == [], said
