"""Spans: timings of the parts of a step, reported as `perf/<name>_time` metrics and as a Chrome trace.

Spans are recorded by any thread or asyncio task of a process and collected once per step by the owner of the step loop
(`collect`). The trace file is written line by line and can be read at any time, even after the process was killed. Code
without its own `Spans` uses `span`, which records to the process-wide recorder. Until `start_recording` is called, that
recorder does not write a trace.

With `--otlp-traces-endpoint`, every span also goes to an OpenTelemetry collector, in batches sent by a thread. Spans
are nested as in the code, also across tasks; the resource says which process of which run they are from. A collector
that does not respond costs spans, never time.

Invariants
1. A span that ends with an exception is also recorded, with the exception's name.
2. Spans in the same row of a trace are nested or disjoint, because each asyncio task has its own row.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from slime.core.errors import ConfigError
from slime.core.files import full_disk_named


class Spans:
    """Records the spans of one process: `with spans("train"): ...`, then `spans.collect()` once per step."""

    def __init__(self, process: str = "main", trace_path: Path | None = None, otlp: Otlp | None = None) -> None:
        """`otlp`: where the spans are sent, too."""
        self._otlp = otlp
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = defaultdict(float)
        self._rows: dict[object, int] = {}
        self._collected_s = time.perf_counter()
        self._file: IO[str] | None = None
        self._epoch_s = time.time() - time.perf_counter()  # one time axis for all processes
        if trace_path is not None:
            trace_path.parent.mkdir(parents=True, exist_ok=True)
            self._file, self._folder = trace_path.open("w", buffering=1), trace_path.parent
            self._file.write("[\n")  # the format allows a missing closing bracket
            self._write({"ph": "M", "name": "process_name", "pid": os.getpid(), "args": {"name": process}})

    @contextmanager
    def __call__(self, name: str, *, timed: bool = True, **facts: Any) -> Iterator[None]:
        """Times the block. `timed=False`: only add it to the trace (for parallel work). `facts`: added to the trace."""
        start_s = time.perf_counter()
        sent = self._otlp.span(name, facts) if self._otlp is not None else nullcontext()
        try:
            with sent:
                yield
        except BaseException as error:
            facts["error"] = type(error).__name__
            raise
        finally:
            self._record(name, start_s, time.perf_counter(), timed, facts)

    def note(self, name: str, begin_s: float, end_s: float, *, row: str | None = None, **facts: Any) -> None:
        """Adds a span from another process to the trace, in Unix time. `row`: by default, one row per name."""
        if self._otlp is not None:
            self._otlp.note(name, begin_s, end_s, facts)
        with self._lock:
            self._event(name, begin_s, end_s, ("noted", row or name), facts)

    def _record(self, name: str, start_s: float, end_s: float, timed: bool, facts: dict[str, Any]) -> None:
        with self._lock:
            if timed:
                self._seconds[name] += end_s - start_s
            self._event(name, self._epoch_s + start_s, self._epoch_s + end_s, _doer(), facts)

    def _event(self, name: str, begin_s: float, end_s: float, doer: object, facts: dict[str, Any]) -> None:
        if self._file is not None:
            row = self._rows.setdefault(doer, len(self._rows))
            event = {"ph": "X", "name": name, "pid": os.getpid(), "tid": row}
            stamp = {"ts": round(begin_s * 1e6), "dur": round((end_s - begin_s) * 1e6)}
            self._write({**event, **stamp, "args": facts})

    def _write(self, event: dict[str, Any]) -> None:
        assert self._file is not None, "cannot write a trace event without a trace file"
        with full_disk_named(self._folder):
            self._file.write(json.dumps(event, default=str) + ",\n")

    def collect(self) -> dict[str, float]:
        """Returns the seconds per name since the last call as `perf/<name>_time`, plus the elapsed time as
        `perf/step_time`."""
        now_s = time.perf_counter()
        with self._lock:
            out = {f"perf/{name}_time": seconds for name, seconds in self._seconds.items()}
            out["perf/step_time"] = now_s - self._collected_s
            self._seconds.clear()
            self._collected_s = now_s
        return out

    def close(self) -> None:
        """Closes the trace file and sends the last spans. Timings can still be collected."""
        if self._otlp is not None:
            self._otlp.close()
            self._otlp = None
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


def _doer() -> object:
    """Returns the key of the current trace row: the asyncio task, or else the thread."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.get_ident() if task is None else task.get_name()


_recorder = Spans()


OTLP_LIMIT_S = 5.0
"""How long the end of a run waits for the last spans to be sent."""


class Otlp:
    """Sends spans to an OpenTelemetry collector over HTTP (`/v1/traces`)."""

    def __init__(self, endpoint: str, *, process: str, run_id: str, exporter: Any = None) -> None:
        """`exporter`: replaces the one for `endpoint`. Raises `ConfigError` if a package is missing."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"--otlp-traces-endpoint needs OpenTelemetry ({error}): pip install 'slime[otel]'"
            ) from error
        facts: dict[str, Any] = {
            "service.name": "slime",
            "slime.run_id": run_id,
            "slime.process": process,
            "process.pid": os.getpid(),
        }
        self._provider = TracerProvider(resource=Resource.create(facts), shutdown_on_exit=False)
        exporter = exporter or OTLPSpanExporter(endpoint=traces_url(endpoint), timeout=OTLP_LIMIT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("slime")

    def span(self, name: str, facts: Mapping[str, Any]) -> AbstractContextManager[Any]:
        """Returns a block whose duration is the span. Spans that begin in the block are its children."""
        return self._tracer.start_as_current_span(name, attributes=_attributes(facts))

    def note(self, name: str, begin_s: float, end_s: float, facts: Mapping[str, Any]) -> None:
        """Sends a span of another process, in Unix time."""
        span = self._tracer.start_span(name, start_time=int(begin_s * 1e9), attributes=_attributes(facts))
        span.end(end_time=int(end_s * 1e9))

    def close(self) -> None:
        """Sends the last spans, for at most `OTLP_LIMIT_S`."""
        self._provider.force_flush(int(1000 * OTLP_LIMIT_S))
        self._provider.shutdown()


def traces_url(endpoint: str) -> str:
    """Returns the URL of a collector's traces: `endpoint` itself if it has a path, else with the standard path."""
    return endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"


def _attributes(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in facts.items()}


def start_recording(process: str, trace_dir: Path | None, *, endpoint: str | None = None, run_id: str = "") -> Spans:
    """Replaces this process's recorder with a new one that writes `<trace_dir>/<process>-<pid>.json`.

    `endpoint`: the OpenTelemetry collector that also gets the spans.
    """
    global _recorder
    _recorder.close()
    path = None if trace_dir is None else trace_dir / f"{process}-{os.getpid()}.json"
    otlp = None if endpoint is None else Otlp(endpoint, process=process, run_id=run_id)
    _recorder = Spans(process, path, otlp)
    return _recorder


@contextmanager
def span(name: str, *, timed: bool = True, **facts: Any) -> Iterator[None]:
    """Times the block with this process's recorder (see `Spans.__call__`)."""
    with _recorder(name, timed=timed, **facts):
        yield


def note_span(name: str, begin_s: float, end_s: float, *, row: str | None = None, **facts: Any) -> None:
    """Adds a span from another process to this process's trace (see `Spans.note`)."""
    _recorder.note(name, begin_s, end_s, row=row, **facts)


def collect() -> dict[str, float]:
    """Returns this process's timings since the last call (see `Spans.collect`)."""
    return _recorder.collect()


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Returns the events of a trace file, which may be incomplete. Skips a truncated last line."""
    events = []
    for line in path.read_bytes().splitlines()[1:]:
        try:
            events.append(json.loads(line.rstrip().rstrip(b",")))
        except (ValueError, RecursionError):
            break
    return events
