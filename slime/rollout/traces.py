"""Measures where a rollout spends its time: spans of executions, waits of requests, and how busy engines are.

    with traced("tool: search", query=query):   # in a generate function; does nothing if the execution is not traced
        ...

Only a few executions and requests appear in the trace, each on its own row. Everything runs on one event loop.

Invariants
1. Two spans on a row are nested or disjoint: concurrent blocks of one execution get separate rows, and a request keeps
   its row from its first wait to its last token.
2. At most `EXECUTION_ROWS` executions are traced at a time, started at least `EVERY_S` apart, and at most `MOST_TRACED`
   requests per batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import Any

from slime.observability.spans import note_span
from slime.rollout.client.call import NO_DRAFTS, Drafts
from slime.rollout.client.upstream import Load, Try, Upstream

EXECUTION_ROWS, EVERY_S = 4, 1.0


class _Row:
    """The rows of one traced execution. Tasks inherit them through `_ROW`."""

    def __init__(self, name: str) -> None:
        self.name, self.lanes = name, set[int]()

    @contextmanager
    def lane(self) -> Iterator[str]:
        number = next(n for n in range(len(self.lanes) + 1) if n not in self.lanes)
        self.lanes.add(number)
        try:
            yield self.name if number == 0 else f"{self.name}.{number}"
        finally:
            self.lanes.discard(number)


_ROW: ContextVar[_Row | None] = ContextVar("slime_traced_row", default=None)


class _Free:
    """The free row numbers of this process, and when the next execution may be traced."""

    def __init__(self) -> None:
        self.rows = list(range(EXECUTION_ROWS))
        self.next_s = 0.0


_FREE = _Free()


@contextmanager
def traced_execution(**facts: Any) -> Iterator[None]:
    """Traces the block as an execution with `facts`, if the next trace is due."""
    now_s = time.monotonic()
    if not _FREE.rows or now_s < _FREE.next_s:
        yield
        return
    number, _FREE.next_s = _FREE.rows.pop(0), now_s + EVERY_S
    token = _ROW.set(_Row(f"execution row {number}"))
    try:
        with traced("execution", **facts):
            yield
    finally:
        _ROW.reset(token)
        _FREE.rows.append(number)


@contextmanager
def traced(name: str, **facts: Any) -> Iterator[None]:
    """Records the block as a span with `facts`, even if it raises. Does nothing if the execution is not traced."""
    row = _ROW.get()
    if row is None:
        yield
        return
    with row.lane() as lane:
        begin_s = time.time()
        try:
            yield
        except BaseException as error:
            facts["error"] = type(error).__name__
            raise
        finally:
            note_span(name, begin_s, time.time(), row=lane, **facts)


ROWS, MOST_TRACED = 8, 64


@dataclass(slots=True)
class Lap:
    """A running attempt of a request. Times are on the event loop's clock."""

    asked_at: float
    row: int | None
    """Row in the trace; None if the attempt is not traced."""


@dataclass(slots=True)
class Sums:
    """Sums over the attempts of one process between two batches."""

    period_s: float = 0.0
    num: int = 0
    num_repeated: int = 0
    place_s: float = 0.0
    most_place_s: float = 0.0
    num_first: int = 0
    first_s: float = 0.0
    most_first_s: float = 0.0
    decode_s: float = 0.0
    tokens: int = 0
    decoded: int = 0
    token_s: float = 0.0
    """Sum over tokens of the seconds that each token spends in an engine."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    verified: int = 0
    accepted: int = 0
    proposed: int = 0
    """See `slime.rollout.client.call.Drafts` for `verified`, `accepted` and `proposed`."""
    idle: float = 1.0
    """Fraction of the time during which the engines run none of these attempts."""

    def joined(self, later: Sums) -> Sums:
        """Returns the combined sums of this period and the next one of the same process."""
        both = {one.name: getattr(self, one.name) + getattr(later, one.name) for one in fields(self)}
        for most in ("most_place_s", "most_first_s"):
            both[most] = max(getattr(self, most), getattr(later, most))
        idle_s = self.idle * self.period_s + later.idle * later.period_s
        both["idle"] = idle_s / both["period_s"] if both["period_s"] > 0 else min(self.idle, later.idle)
        return Sums(**both)


@dataclass(slots=True)
class LoadSums:
    """What one engine reported to one process between two batches."""

    limit: int = 0
    """The newest limit on the process's requests."""
    num: int = 0
    queued: int = 0
    most_queued: int = 0
    kv_use: float = 0.0
    most_kv_use: float = 0.0

    def add(self, load: Load, *, limit: int) -> None:
        self.limit, self.num = limit, self.num + 1
        self.queued, self.most_queued = self.queued + load.queued, max(self.most_queued, load.queued)
        self.kv_use, self.most_kv_use = self.kv_use + load.kv_use, max(self.most_kv_use, load.kv_use)

    def beside(self, other: LoadSums) -> LoadSums:
        """Returns the sums of two processes, which limit their own requests each."""
        return LoadSums(
            self.limit + other.limit,
            self.num + other.num,
            self.queued + other.queued,
            max(self.most_queued, other.most_queued),
            self.kv_use + other.kv_use,
            max(self.most_kv_use, other.most_kv_use),
        )


MOST_ENGINES = 32
"""Maximum number of engines with metrics of their own."""


def load_metrics(taken: Iterable[Mapping[str, LoadSums]], numbers: Mapping[str, int]) -> dict[str, float]:
    """Returns `perf/engine_limit/*`, `perf/engine_queue/*` and `perf/engine_kv_use/*` from the reports of all
    processes; {} without reports. `numbers`: engine -> its number in the names of metrics.
    """
    of_engine: dict[str, LoadSums] = {}
    for seen in taken:
        for url, sums in seen.items():
            of_engine[url] = of_engine[url].beside(sums) if url in of_engine else sums
    if not of_engine:
        return {}
    limits = {url: float(sums.limit) for url, sums in of_engine.items()}
    queues = {url: sums.queued / sums.num for url, sums in of_engine.items()}
    uses = {url: sums.kv_use / sums.num for url, sums in of_engine.items()}
    metrics = {
        "perf/engine_limit/min": min(limits.values()),
        "perf/engine_limit/max": max(limits.values()),
        "perf/engine_queue/max": float(max(sums.most_queued for sums in of_engine.values())),
        "perf/engine_kv_use/max": max(sums.most_kv_use for sums in of_engine.values()),
    }
    for name, values in (("limit", limits), ("queue", queues), ("kv_use", uses)):
        metrics[f"perf/engine_{name}/mean"] = sum(values.values()) / len(values)
        known = sorted((numbers[url], value) for url, value in values.items() if url in numbers)
        metrics |= {f"perf/engine_{name}/{number}": value for number, value in known if number < MOST_ENGINES}
    return metrics


@dataclass(slots=True)
class Traffic:
    """Measures how long the requests of one client wait: for a slot at an engine, for the first token (queueing and
    prefill), and for the remaining tokens. `traffic_metrics` combines several processes.
    """

    since: float | None = None
    """Time of the last `take_sums`; before the first call, the time of the first request."""
    _sums: Sums = field(default_factory=Sums)
    _rows: list[int] = field(default_factory=lambda: list(range(ROWS)))
    _num_traced: int = 0

    def begin_try(self, now: float) -> Lap:
        self.since = now if self.since is None else self.since
        traced = self._num_traced < MOST_TRACED and bool(self._rows)
        self._num_traced += traced
        return Lap(now, self._rows.pop() if traced else None)

    def end_try(
        self,
        lap: Lap,
        one: Try | None,
        now: float,
        *,
        tokens: int,
        read: tuple[int, int],
        again: bool,
        drafted: Drafts = NO_DRAFTS,
    ) -> None:
        """Counts an attempt that has ended, or that got no slot (`one` is None).

        `tokens`: number of sampled tokens. `read`: number of prompt tokens, and how many of them the engine had cached.
        `again`: whether this is a retry.
        """
        sums, placed_at = self._sums, now if one is None else one.placed_at
        sums.num += 1
        sums.num_repeated += again
        sums.place_s += placed_at - lap.asked_at
        sums.most_place_s = max(sums.most_place_s, placed_at - lap.asked_at)
        first_at = None if one is None else one.first_at
        if first_at is not None:
            sums.num_first += 1
            sums.first_s += first_at - placed_at
            sums.most_first_s = max(sums.most_first_s, first_at - placed_at)
            sums.decode_s += now - first_at
            sums.token_s += read[0] * (now - placed_at) + tokens / 2 * (now - first_at)
            sums.decoded += max(0, tokens - 1)
            sums.prompt_tokens += read[0]
            sums.cached_tokens += read[1]
        sums.tokens += tokens
        sums.verified += drafted.verified
        sums.accepted += drafted.accepted
        sums.proposed += drafted.proposed
        if lap.row is not None:
            self._trace(lap, one, now, tokens=tokens, read=read, again=again)
            self._rows.append(lap.row)

    def take_sums(self, upstreams: Iterable[Upstream], now: float) -> Sums | None:
        """Returns the sums since the last call; None without requests. `upstreams`: the currently admitted engines."""
        sums, since = self._sums, self.since
        self._sums, self.since, self._num_traced = Sums(), now, 0
        shares = [(upstream.take_busy_s(now), now - max(since or now, upstream.admitted_at)) for upstream in upstreams]
        if not sums.num or since is None:
            return None
        sums.period_s = now - since
        if (there := sum(period for _, period in shares)) > 0:
            sums.idle = max(0.0, 1.0 - sum(busy for busy, _ in shares) / there)
        return sums

    def _trace(self, lap: Lap, one: Try | None, now: float, *, tokens: int, read: tuple[int, int], again: bool) -> None:
        to_unix, row = time.time() - now, f"request row {lap.row}"
        placed_at = now if one is None else one.placed_at
        note_span("request: place", to_unix + lap.asked_at, to_unix + placed_at, row=row, again=again)
        if one is None:
            return
        engine, first_at = {"engine": one.upstream.url, "rid": one.rid}, now if one.first_at is None else one.first_at
        facts = {**engine, "prompt": read[0], "cached": read[1]}
        note_span("request: first token", to_unix + placed_at, to_unix + first_at, row=row, **facts)
        if one.first_at is not None:
            note_span("request: decode", to_unix + first_at, to_unix + now, row=row, tokens=tokens, **engine)


def traffic_metrics(taken: Iterable[Sums | None]) -> dict[str, float]:
    """Returns `perf/request_*`, `perf/engine_*` and `rollout/spec_*` from the sums of all processes; {} without
    requests.
    """
    of_each = [sums for sums in taken if sums is not None]
    if not of_each:
        return {}

    def total(name: str) -> float:
        return float(sum(getattr(sums, name) for sums in of_each))

    metrics = {
        "perf/request_place_wait/mean": total("place_s") / total("num"),
        "perf/request_place_wait/max": max(sums.most_place_s for sums in of_each),
        "perf/requests_repeated": total("num_repeated"),
        "perf/requests_in_flight": sum(
            (sums.place_s + sums.first_s + sums.decode_s) / max(sums.period_s, 1e-9) for sums in of_each
        ),
        "perf/tokens_in_flight": sum(sums.token_s / max(sums.period_s, 1e-9) for sums in of_each),
        "perf/engine_idle_ratio": min(sums.idle for sums in of_each),
    }
    if num_first := total("num_first"):
        metrics["perf/request_first_token/mean"] = total("first_s") / num_first
        metrics["perf/request_first_token/max"] = max(sums.most_first_s for sums in of_each)
    if decoded := total("decoded"):
        metrics["perf/request_decode_tokens_per_sec"] = decoded / max(total("decode_s"), 1e-9)
    if read := total("prompt_tokens"):
        metrics["perf/prefix_cache_hit_rate"] = total("cached_tokens") / read
    if verified := total("verified"):
        metrics["rollout/spec_accept_length"] = 1.0 + total("accepted") / verified
        metrics["rollout/spec_accept_rate"] = total("accepted") / max(total("proposed"), 1.0)
    return metrics
