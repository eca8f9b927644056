"""Spans as an OpenTelemetry collector receives them, decoded with the protocol's own messages."""

from __future__ import annotations

import asyncio
import gzip
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from slime.observability.spans import Otlp, Spans, traces_url


class Collector(HTTPServer):
    def __init__(self) -> None:
        self.requests: list[tuple[str, ExportTraceServiceRequest]] = []
        super().__init__(("127.0.0.1", 0), Receiver)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def spans(self) -> dict[str, Any]:
        """Name -> span."""
        return {
            span.name: span
            for _, request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        }


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.requests.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Collector() as server:
        yield server
        server.shutdown()


def test_spans_arrive_nested_with_their_facts_and_errors(collector: Collector) -> None:
    spans = Spans("driver", otlp=Otlp(collector.url, process="driver", run_id="run-7"))

    async def both() -> None:
        async def one(name: str) -> None:
            with spans(name, timed=False):
                await asyncio.sleep(0)

        await asyncio.gather(one("left"), one("right"))

    with spans("step", rollout_id=3):
        asyncio.run(both())
        with pytest.raises(ValueError), spans("train"):
            raise ValueError("no")
    begin_s = time.time() - 5
    spans.note("generation", begin_s, begin_s + 2, version=4)
    spans.close()
    ((path, request), *_) = collector.requests
    assert path == "/v1/traces"
    facts = {kv.key: kv.value.string_value for kv in request.resource_spans[0].resource.attributes}
    assert (facts["service.name"], facts["slime.run_id"], facts["slime.process"]) == ("slime", "run-7", "driver")
    found = collector.spans()
    assert found.keys() == {"step", "left", "right", "train", "generation"}
    step = found["step"]
    assert {found[name].parent_span_id for name in ("left", "right", "train")} == {step.span_id}
    assert [(kv.key, kv.value.int_value) for kv in step.attributes] == [("rollout_id", 3)]
    assert found["train"].status.code == 2, "an error"
    generation = found["generation"]
    assert generation.end_time_unix_nano - generation.start_time_unix_nano == pytest.approx(2e9, abs=1e3)


def test_an_endpoint_without_a_path_gets_the_standard_one() -> None:
    assert traces_url("http://h:4318") == traces_url("http://h:4318/") == "http://h:4318/v1/traces"
    assert traces_url("https://h/otel/traces") == "https://h/otel/traces"
