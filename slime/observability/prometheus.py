"""`--metrics-port`: the run's metrics for Prometheus, the targets to scrape, and a Grafana dashboard.

The driver serves `/metrics` from one thread: the newest value of every logged metric, and the state of the run and of
its engines. Engines and routers serve their own metrics. `prometheus/` in the run folder has everything that a
Prometheus server needs:

    targets.json      service discovery (`file_sd_configs`): this endpoint, the engines, the routers
    scrape.yaml       a scrape job that reads `targets.json` and the key
    key               the bearer token of this endpoint, readable only by the owner
    dashboard.json    a dashboard for Grafana

Invariants
1. The endpoint listens on loopback by default, and answers only requests with the run's key.
2. A metric has the same name in every run: `slime_` and its name in `metrics.jsonl`, with `_` for other characters. The
   last part of the names in `LABELLED` varies from run to run, so it becomes a label.
3. Values are written under a lock and read as a whole, so an answer never mixes two records of a kind.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from slime.core.errors import ConfigError
from slime.core.files import replace_text, write_json
from slime.core.processes import host_port, ip_of, is_loopback
from slime.observability.sinks import StepRecord, eval_name

logger = logging.getLogger(__name__)

DASHBOARD = Path(__file__).with_name("dashboard.json")
LABELLED: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "rollout": {
        "failed/": ("failed", "reason"),
        "retried/": ("retried", "reason"),
        "dynamic_filter/drop_": ("dynamic_filter_drop", "reason"),
        "num_empty_turns/": ("num_empty_turns_by_limit", "limit"),
        "zero_std/count_": ("zero_std_count", "reward"),
        "score/": ("score", "key"),
        "error_cat/": ("error_cat", "value"),
    },
    "passrate": {"": ("pass", "k")},
    "data": {
        "filtered/": ("filtered_by_reason", "reason"),
        "failed/": ("failed_by_reason", "reason"),
        "returned/": ("returned_by_reason", "reason"),
    },
    "perf": {
        "paused_token_seconds/": ("paused_token_seconds_by_cause", "cause"),
        "engine_limit/": ("engine_limit", "engine"),
        "engine_queue/": ("engine_queue", "engine"),
        "engine_kv_use/": ("engine_kv_use", "engine"),
        "rank_train_time/": ("rank_train_time", "rank"),
    },
}
"""Area of a metric -> beginning of the rest of its name -> (name for Prometheus, label for what follows)."""
_OTHER = re.compile(r"[^a-zA-Z0-9_]+")
Labels = tuple[tuple[str, str], ...]


def exposed_name(metric: str) -> tuple[str, Labels]:
    """Returns the name and labels under which Prometheus sees a metric."""
    if (dataset := eval_name(metric)) is not None:
        return "slime_eval_score", (("dataset", dataset),)
    area, _, rest = metric.partition("/")
    for beginning, (name, label) in LABELLED.get(area, {}).items():
        if rest.startswith(beginning):
            return f"slime_{area}_{name}", ((label, rest.removeprefix(beginning)),)
    return f"slime_{_OTHER.sub('_', metric)}", ()


@dataclass(frozen=True, slots=True)
class Target:
    """An address to scrape."""

    address: str
    """HOST:PORT."""
    part: str
    """`run`, `engine` or `router`."""
    labels: Mapping[str, str]


class Exposed:
    """The newest value of every metric. `collect` makes it a collector of prometheus_client."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, dict[Labels, float]] = {}
        self._help: dict[str, str] = {}
        self._counters: set[str] = set()

    def take(self, record: StepRecord) -> None:
        """Takes one logged step."""
        with self._lock:
            for metric, value in record.metrics.items():
                name, labels = exposed_name(metric)
                self._set(name, value, labels, f"{metric} in metrics.jsonl")
            kind = (("kind", record.kind),)
            self._set("slime_step", record.step, kind, "newest step by kind")
            self._set("slime_step_logged_seconds", record.time_s, kind, "Unix time of the newest step by kind")

    def set(self, name: str, value: float, help: str, **labels: str) -> None:
        with self._lock:
            self._set(name, value, tuple(sorted(labels.items())), help)

    def count(self, name: str, help: str, *, by: float = 1.0, **labels: str) -> None:
        """Adds to a counter, whose name must end in `_total`."""
        assert name.endswith("_total"), f"a counter ends in _total, unlike {name}"
        key = tuple(sorted(labels.items()))
        with self._lock:
            self._counters.add(name)
            self._set(name, self._values.get(name, {}).get(key, 0.0) + by, key, help)

    def replace(self, name: str, values: Mapping[Labels, float], help: str) -> None:
        """Replaces all values of a name, so that labels that are gone disappear."""
        with self._lock:
            self._values[name], self._help[name] = dict(values), help

    def _set(self, name: str, value: float, labels: Labels, help: str) -> None:
        known = self._values.setdefault(name, {})
        if known and {k for k, _ in next(iter(known))} != {k for k, _ in labels}:
            return  # two metrics whose names differ only in characters that Prometheus does not allow
        known[labels] = float(value)
        self._help.setdefault(name, help)

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            values = {name: dict(of_name) for name, of_name in self._values.items()}
            helps, counters = dict(self._help), set(self._counters)
        for name, of_name in sorted(values.items()):
            labels = sorted({key for key, _ in next(iter(of_name))}) if of_name else []
            kind = CounterMetricFamily if name in counters else GaugeMetricFamily
            family = kind(name, helps[name], labels=labels)
            for key, value in of_name.items():
                found = dict(key)
                family.add_metric([found[label] for label in labels], value)
            yield family


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    address_family = socket.AF_INET


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def guarded_by(key: str, app: Wsgi) -> Wsgi:
    """Returns an application that refuses requests without `Authorization: Bearer KEY`."""

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        given = str(environ.get("HTTP_AUTHORIZATION", "")).encode()
        if hmac.compare_digest(given, f"Bearer {key}".encode()):
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
        return [b"send Authorization: Bearer KEY, with the key in prometheus/key of the run folder\n"]

    return guarded


class PrometheusSink:
    """Serves the metrics of a run until `close`."""

    essential = False

    def __init__(self, run_dir: Path, *, run_id: str, host: str, port: int) -> None:
        """`port`: 0 picks a free one. Raises `ConfigError` if it cannot listen there."""
        from prometheus_client import CollectorRegistry, make_wsgi_app

        self.exposed = Exposed()
        self.folder = run_dir / "prometheus"
        self._run_id, self._run_dir, self._host = run_id, run_dir, host
        self._scraped: tuple[Target, ...] = ()
        registry = CollectorRegistry()
        registry.register(self.exposed)
        self._key = secrets.token_hex(32)
        ip = ip_of(host)
        kind = _Server6 if ip is not None and ip.version == 6 else _Server
        app = guarded_by(self._key, make_wsgi_app(registry))
        try:
            self._server = make_server(host, port, app, server_class=kind, handler_class=_Quiet)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--metrics-port {port} cannot be opened on {host}: {error}; choose another port, or 0 for a free one"
            ) from error
        self.port = int(self._server.server_address[1])
        self._write_files()
        self.exposed.set("slime_run_info", 1, "the run", run_dir=str(run_dir))
        self.exposed.set("slime_run_start_seconds", time.time(), "Unix time of the launch")
        self.exposed.count("slime_alerts_total", "alerts by kind", by=0.0, kind="hang")
        self.exposed.count("slime_hangs_total", "hangs that were reported", by=0.0)
        self.set_scraped(())
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="prometheus", daemon=True).start()
        logger.info("metrics for Prometheus are at http://%s/metrics; see %s", self.address, self.folder)
        if not is_loopback(host):
            logger.warning("the metrics endpoint listens on %s; requests need the key in %s", host, self.folder / "key")

    @property
    def address(self) -> str:
        everywhere = self._host in ("0.0.0.0", "::")
        return host_port(socket.gethostname() if everywhere else self._host, self.port)

    def write(self, record: StepRecord) -> None:
        self.exposed.take(record)

    def count_alert(self, kind: str) -> None:
        self.exposed.count("slime_alerts_total", "alerts by kind", kind=kind)

    def set_scraped(self, others: Sequence[Target]) -> None:
        """Writes the service-discovery file: this endpoint and others. Does nothing if they have not changed."""
        everyone = (Target(self.address, "run", {}), *others)
        if everyone != self._scraped:
            self._scraped = everyone
            common = {"run": self._run_dir.name, "run_id": self._run_id}
            found = [{"targets": [t.address], "labels": {**common, "part": t.part, **t.labels}} for t in everyone]
            write_json(self.folder / "targets.json", found, durable=False, indent=2)

    def close(self, *, failed: bool = False) -> None:
        self._server.shutdown()
        self._server.server_close()
        write_json(self.folder / "targets.json", [], durable=False)

    def _write_files(self) -> None:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        key = self.folder / "key"
        key.unlink(missing_ok=True)
        with open(key, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(self._key)
        here = self.folder.absolute()
        replace_text(
            self.folder / "scrape.yaml",
            "scrape_configs:\n"
            f"  - job_name: slime-{self._run_dir.name}\n"
            "    file_sd_configs:\n"
            f"      - files: ['{here / 'targets.json'}']\n"
            f"    authorization: {{credentials_file: '{here / 'key'}'}}\n",
            durable=False,
        )
        shutil.copyfile(DASHBOARD, self.folder / "dashboard.json")
