"""Alerts: each incident reaches a webhook and a command once, says what to do, and never stops the run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from slime.observability import health
from slime.observability.health import Alerts, HealthSink, HealthWatch
from slime.observability.sinks import StepRecord

URL_SECRET = "token-of-the-hook"


class Hook(HTTPServer):
    """A real server that keeps what it receives. `failures`: how many requests it refuses first."""

    def __init__(self, failures: int = 0) -> None:
        self.received: list[dict[str, Any]] = []
        self.failures = failures
        super().__init__(("127.0.0.1", 0), Receiver)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{URL_SECRET}"


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Hook)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = 200
        if self.server.failures:
            self.server.failures -= 1
            status = 503
        else:
            self.server.received.append(json.loads(body))
        self.send_response(status)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(health, "ALERT_PAUSE_S", 0.01)
    with Hook() as server:
        yield server
        server.shutdown()


def alerts(webhook: str | None = None, command: str | None = None) -> Alerts:
    return Alerts(webhook=webhook, command=command, run_id="r-1", run_dir="/runs/a")


def test_an_incident_is_delivered_once_until_it_is_over(hook: Hook) -> None:
    sender = alerts(hook.url)
    for _ in range(3):
        sender.fire("hang", "rank 1 is stopped; kill -CONT 7", key="ranks", step=4)
    sender.fire("hang", "another one", key="rollout")
    sender.resolve("hang", key="ranks")
    sender.fire("hang", "again", key="ranks")
    sender.close()
    assert [one["text"].rpartition("hang: ")[2] for one in hook.received] == [
        "rank 1 is stopped; kill -CONT 7",
        "another one",
        "again",
    ]
    first = hook.received[0]
    assert (first["kind"], first["run_id"], first["run_dir"], first["step"]) == ("hang", "r-1", "/runs/a", 4)


def test_a_webhook_that_fails_is_tried_again_and_its_address_is_not_logged(
    hook: Hook, caplog: pytest.LogCaptureFixture
) -> None:
    hook.failures = 2
    sender = alerts(hook.url)
    sender.fire("restart", "the run restarts")
    sender.close()
    assert len(hook.received) == 1 and not caplog.records
    hook.failures = 3
    sender = alerts(hook.url)
    began = time.monotonic()
    sender.fire("restart", "the run restarts")
    assert time.monotonic() - began < 1.0, "the run does not wait for the webhook"
    sender.close()
    (record,) = caplog.records
    assert "--alert-webhook did not take the alert 'restart'" in record.getMessage()
    assert "503" in record.getMessage() and URL_SECRET not in record.getMessage()


def test_a_command_reads_the_alert_from_its_environment(tmp_path: Path) -> None:
    """What the alert says is data: a quote in it ends nothing and starts nothing."""
    out = tmp_path / "out"
    sender = alerts(command=f'printf "%s|%s|%s" "$SLIME_ALERT_KIND" "$SLIME_ALERT_TEXT" "$SLIME_ALERT_STEP" > {out}')
    text = '"; touch hacked; $(touch hacked)'
    sender.fire("MFU drop", text, step=3)
    sender.close()
    assert out.read_text() == f"MFU drop|{text}|3"


def test_a_command_that_fails_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "ALERT_TRIES", 1)
    sender = alerts(command="echo no pager >&2; exit 3")
    sender.fire("hang", "x")
    sender.close()
    assert "--alert-command did not take the alert 'hang': exit status 3: no pager" in caplog.text


def test_a_finding_in_the_metrics_reaches_the_webhook(tmp_path: Path, hook: Hook) -> None:
    sender = alerts(hook.url)
    sink = HealthSink(tmp_path / "none.jsonl", alerts=sender)
    for step in range(6):
        metrics = {"rollout/zero_std/ratio": 1.0, "rollout/raw_reward_std": 0.4, "rollout/raw_reward": 0.5}
        sink.write(StepRecord("rollout", step, metrics))
    sender.close()
    (one,) = hook.received
    assert (one["kind"], one["step"]) == ("no learning signal", 1) and "every advantage is zero" in one["text"]


def kinds(rows: list[dict[str, float]]) -> list[tuple[str, int]]:
    watch = HealthWatch()
    return [(finding.kind, finding.step) for step, row in enumerate(rows) for finding in watch.see(step, row)]


def test_steps_are_slow_only_for_their_number_of_tokens() -> None:
    def row(tokens: float, seconds: float, save_s: float = 0.0) -> dict[str, float]:
        times = {"perf/step_time": seconds + save_s, "perf/save_model_time": save_s}
        return {"rollout/response_tokens": tokens, **times}

    usual = [row(1000.0, 10.0)] * 10
    assert kinds([*usual, *[row(4000.0, 40.0)] * 5, *[row(1000.0, 10.0, save_s=90.0)] * 5]) == []
    assert kinds([*usual, *[row(1000.0, 25.0)] * 3]) == [("rising step time", 12)]
    assert kinds([*[row(10.0, 0.1)] * 10, *[row(10.0, 0.5)] * 5]) == [], "a fraction of a second is noise"


def test_a_drop_in_the_rate_of_training_is_found_on_gpus_only() -> None:
    for usual, found in ((200.0, [("MFU drop", 12)]), (0.02, [])):
        rows = [{"perf/actor_train_tflops": rate} for rate in [usual] * 10 + [0.5 * usual] * 3]
        assert kinds(rows) == found


def test_a_straggler_is_one_rank_that_is_slow_in_step_after_step() -> None:
    def row(rank: int, seconds: float) -> dict[str, float]:
        slowest = {"perf/slowest_rank": float(rank), "perf/slowest_rank_train_time": seconds}
        return {**slowest, "perf/median_rank_train_time": 4.0}

    assert kinds([row(step % 3, 6.0) for step in range(9)]) == [], "uneven batches slow another rank each time"
    assert kinds([row(5, 4.3)] * 9) == []
    assert kinds([row(5, 6.0)] * 9) == [("straggler", 4)]
