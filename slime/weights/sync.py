"""Syncs one weight version to all engines: pause -> drain -> begin -> send -> verify -> end -> resume.

Reads the trainer's tensors once, turn by turn (`send_plan.Turn`). Afterwards, either all engines serve these tensors or
every rank raises an error. Each wait for an engine has the timeout of its control port.

Every training rank calls `sync_weights` and iterates over all turns, even after a failure, because filling a bucket is
a collective over the ranks that have shards of its tensors. Rank 0 is the conductor: it pauses the engines, verifies
their weights and resumes them. At the end all ranks agree on the outcome, so either all of them raise or none does. The
exception is a rank that drops out of a trainer collective, for example because it ran out of memory. It raises
immediately, which ends the run. A bucket is sent to the engines while the next one is filled (`delivery`), unless every
rank needs each bucket (`Channel.everywhere`). In that case each turn ends before the next one starts.

Invariants
1. From the first changed tensor until every tensor on every rank has been verified, no engine serves requests.
2. After a failure, the engines stay paused, except those that had already resumed with the verified version when the
   sync failed on another engine. The next weight sync can start from any of these states.
3. The sender computes a tensor's digest from the trainer's own tensor, before copying it into the bucket. In addition
   to its model, a rank needs memory for two buckets, which includes the tensors that it gathers
   (`Outgoing.fill_bytes`). A parameter larger than a bucket, or buckets that go to all ranks, take more.
4. Updates never flush the engine's cache themselves, because a flush crashes an engine with running requests. With
   `abort`, a separate flush follows the pause and also proves that no request is running. A paused engine admits no new
   requests, so the cache stays empty. With `retract` and `in_place`, requests stay and the cache cannot be flushed.
   Instead, the cache is partitioned by weights (`slime.compat.sglang_version_prefixes`): the scheduler counts updates
   and matches only prefixes with the current count. So two sets of weights never share a prefix, even if they have the
   same `version` or if one of them comes from a failed sync. `slime.settings.groups.engines` rejects caches that are
   not partitioned or that a flush does not empty.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from slime.core.engine_interface import Digest, RankChecksums
from slime.core.errors import DeadlineExceeded, SlimeError, WeightSyncError
from slime.core.text import listed
from slime.core.topology import EngineLayout
from slime.models.common.table import FamilyTable
from slime.weights.delivery import Delivery, send_stream
from slime.weights.engine_layout import Digests, Expected, ExpectedDigests, merged, require_all
from slime.weights.receivers import Peers, Receiver, on_all
from slime.weights.recorded_fills import RecordedFills, copy, fill_with
from slime.weights.send_plan import NUM_BUFFERS, Bucket, Buffers, Outgoing, Spec, Turn
from slime.weights.transports import Channel


@dataclass(frozen=True, slots=True)
class Difference:
    """How the tensors on one engine rank differ from the expected ones. All names are sorted resident names."""

    missing: tuple[str, ...]
    extra: tuple[str, ...]
    differing: tuple[str, ...]
    """Tensors with a different digest."""
    num_equal: int

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.differing)


def _is(expected: Expected, actual: str) -> bool:
    return actual == expected if isinstance(expected, str) else actual in expected


def compare(expected: Mapping[str, Expected], actual: Mapping[str, str]) -> Difference:
    shared = sorted(set(expected) & set(actual))
    differing = tuple(n for n in shared if not _is(expected[n], actual[n]))
    return Difference(
        missing=tuple(sorted(set(expected) - set(actual))),
        extra=tuple(sorted(set(actual) - set(expected))),
        differing=differing,
        num_equal=len(shared) - len(differing),
    )


def require_equal(
    table: FamilyTable,
    expected: Digests,
    reports: Mapping[str, tuple[EngineLayout, Sequence[RankChecksums]]],
    *,
    version: int,
    transport: str,
    carried: Mapping[str, str] | None = None,
) -> None:
    """Raises a `WeightSyncError` that lists all missing, extra and differing tensors by engine and rank.

    Engines do not report buffers that are never loaded, such as rotary tables. Tensors that the trainer does not send
    come from the checkpoint.

    `expected`: see `Digests`. `reports`: engine URL -> (layout, reports of its ranks); a rank may report several times.
    `carried`: resident name -> digest of tensors that the trainer reads but does not send, such as a vision tower.
    These are compared only on single-rank engines.
    """
    complaints: set[str] = set()
    departing: set[str] = set()
    equal: dict[Any, Mapping[str, str]] = {}
    """(layout, rank) -> digests that are as expected. Those of the next engine are usually the same."""
    for url, (layout, ranks) in reports.items():
        if problem := _misreported(layout, ranks):
            complaints.add(f"engine {url} {problem}")
            departing.add(url)
            continue
        for rank, reported in ((r.rank, r.checksums) for r in ranks):
            if reported == equal.get((layout, rank)):
                continue
            alike = carried if carried and layout.num_ranks == 1 else {}
            held = {name: d for name, d in reported.items() if name in alike or not table.carries(name)}
            difference = compare({**expected[layout][rank], **alike}, held)
            if difference:
                complaints.add(f"engine {url} rank {rank}: {describe(table, difference)}")
                departing.add(url)
            else:
                equal[layout, rank] = reported
    if complaints:
        error = WeightSyncError(
            f"the weights of version {version}, sent by {transport}, differ from the trainer's and must not be served: "
            f"{'; '.join(sorted(complaints))}. The engines stay paused; sync again, or replace them"
        )
        error.engines = tuple(sorted(departing))
        raise error


def _misreported(layout: EngineLayout, ranks: Sequence[RankChecksums]) -> str | None:
    """Describes the problem if `ranks` does not cover all ranks of an engine with this layout; None if it does."""
    named = ("tp_size", "pp_size", "dp_size")
    for report in ranks:
        if any(getattr(report.layout, name) != getattr(layout, name) for name in named):
            return f"reports the layout {report.layout}, but was started with {layout}"
    numbers = {rank: number for number, rank in enumerate(layout.ranks())}
    got = sorted({numbers.get(report.rank, -1) for report in ranks})
    return None if got == list(range(layout.num_ranks)) else f"reported ranks {got}, but has {layout.num_ranks} ranks"


def describe(table: FamilyTable, difference: Difference) -> str:
    """Formats a difference as one line of resident names, with the HF tensors that each contains."""
    hf = {name: tuple(n for e in held for n in e.hf) for name, held in table.resident.items()}

    def some(names: tuple[str, ...]) -> str:
        return listed([n if hf.get(n, (n,)) == (n,) else f"{n} (holds {listed(hf[n], 3)})" for n in names])

    kinds = (("differing", difference.differing), ("missing", difference.missing), ("extra", difference.extra))
    text = "; ".join(f"{kind}: {some(names)}" for kind, names in kinds if names)
    hint = "" if difference.num_equal else " (all tensors differ: do trainer and engine use the same dtype?)"
    return text + hint


def sync_weights(
    outgoing: Outgoing,
    *,
    receivers: Sequence[Receiver],
    channel: Channel,
    digest: Digest,
    version: int,
    buffer_bytes: int,
    peers: Peers | None = None,
    pause_mode: str = "abort",
    buffers: Buffers | None = None,
    fills: RecordedFills | None = None,
    carried: Mapping[str, str] | None = None,
) -> dict[str, float]:
    """Sends `version` to all engines and returns timings and sizes. Collective over all training ranks.

    `outgoing`: the weights, in the engine's dtype. `buffer_bytes`: bucket size. `pause_mode`: what happens to running
    requests (`abort`, `retract` or `in_place`). `buffers` and `fills`: those of this rank's earlier weight syncs, for
    reuse. `carried`: see `require_equal`.

    Returns, in seconds and bytes: `update_weights_time` (total), `update_weights_pause_time`,
    `update_weights_send_time` (from the first bucket to the engines' answer to the last one),
    `update_weights_verify_time` (digests on the engines, and their comparison), `update_weights_digest_time` (digests
    on the slowest training rank; overlaps sending) and
    `update_weights_bytes`. In GPU-seconds of the engines: `PAUSED` and `PAUSED/<cause>` (see `PauseCauses`).

    Raises on every rank: `WeightSyncError` if an engine's weights differ, `EngineError` or `DeadlineExceeded` if an
    engine cannot be reached.
    """
    fills = fills or RecordedFills(on=False)
    run = _WeightSync(outgoing, receivers, channel, digest, version, peers or Peers(), pause_mode, fills, carried)
    run.send_all(buffers or run.buffers(), buffer_bytes)
    outcome = run.agree()
    run.end_fills(good=not isinstance(outcome, SlimeError))
    if isinstance(outcome, SlimeError):
        channel.abandon()
        raise outcome
    channel.settle()
    return outcome


PAUSED = "paused_token_seconds"
"""GPU-seconds in which engines could have generated, but did not, because of a weight sync."""
CAUSES = ("abort", "flush", "transfer", "verify", "admission")
"""In the order in which they follow each other. abort: until all engines have paused and requests are aborted or
retracted; flush: of the caches; transfer: until all engines have all weights; verify: until all tensors on all engines
are compared; admission: until all engines sample again."""


class PauseCauses:
    """Splits the time from the first pause call to the last response to a resume call. Every moment has one cause."""

    def __init__(self, num_gpus: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`num_gpus`: those of all engines of the weight sync."""
        self._num_gpus, self._clock = num_gpus, clock
        self._seconds = dict.fromkeys(CAUSES, 0.0)
        self._since: float | None = None

    def begin(self) -> None:
        """The engines are about to be paused."""
        self._since = self._clock()

    def end(self, cause: str) -> None:
        """The time since `begin`, or since the last `end`, is due to `cause`. Does nothing before `begin`."""
        if self._since is not None:
            now = self._clock()
            self._seconds[cause] += now - self._since
            self._since = now

    def metrics(self) -> dict[str, float]:
        """Returns `PAUSED` and `PAUSED/<cause>` in GPU-seconds. `PAUSED` is the sum of the causes."""
        parts = {f"{PAUSED}/{cause}": seconds * self._num_gpus for cause, seconds in self._seconds.items()}
        return {PAUSED: sum(parts.values()), **parts}


@dataclass(frozen=True, slots=True)
class _RankReport:
    """What a rank reports to the conductor after the last turn."""

    failure: SlimeError | None
    digests: Digests = field(default_factory=dict)
    """Expected digests of the tensors sent by this rank."""
    report: Any = None
    """The result of `Channel.report`."""
    sends: bool = False
    send_s: float = 0.0
    digest_s: float = 0.0


class _WeightSync:
    """The state of one weight sync on one rank."""

    def __init__(
        self,
        outgoing: Outgoing,
        receivers: Sequence[Receiver],
        channel: Channel,
        digest: Digest,
        version: int,
        peers: Peers,
        pause_mode: str,
        fills: RecordedFills,
        carried: Mapping[str, str] | None,
    ) -> None:
        self._carried, self._fills = carried, fills
        self._outgoing, self._receivers, self._channel, self._version = outgoing, receivers, channel, version
        self._peers, self._pause_mode = peers, pause_mode
        self._layouts = tuple(receiver.control.layout for receiver in receivers)
        self._digest = digest
        self._key: Callable[[], Hashable] = lambda: None
        self._expected = self._no_digests()
        self._failure: SlimeError | None = None
        self._started = time.monotonic()
        self._times = dict.fromkeys(("pause", "send", "verify", "digest"), 0.0)
        self._causes = PauseCauses(sum(layout.num_ranks for layout in self._layouts))
        self._begun = False
        self._sent: list[Turn] = []
        self._replayed: list[Turn] = []
        """This rank's turns, by how their buckets were filled."""
        self._num_bytes = 0

    def _key_of(self, turns: Sequence[Turn], buffers: Buffers) -> Hashable:
        """Returns the key of what a recorded fill contains (`RecordedFills`), or None if nothing can be recorded."""
        places = self._outgoing.places
        return None if places is None else (places, buffers.places, self._layouts, turns)

    def end_fills(self, *, good: bool) -> None:
        self._fills.end(self._key(), good=good)

    def _no_digests(self) -> ExpectedDigests:
        return ExpectedDigests(self._outgoing.table, self._layouts, self._digest)

    def buffers(self) -> Buffers:
        return Buffers(lambda num_bytes: self._channel.allocate(num_bytes, self._outgoing.device))

    def send_all(self, buffers: Buffers, buffer_bytes: int) -> None:
        """Runs all turns. On return, this rank's buckets have been delivered or the sync has failed."""
        turns = tuple(self._outgoing.turns(buffer_bytes))
        self._num_bytes = sum(turn.num_bytes for turn in turns)
        if self._peers.conducts:
            sent = {name for turn in turns for name in turn.hf_names}
            self._guarded(require_all, self._outgoing.table.hf_names, sent)  # before any engine is paused
            self._guarded(self._pause)
        if self._channel.everywhere:
            self._send_everywhere(turns, buffers)
        else:
            self._send_in_turn(turns, buffers, buffer_bytes)

    def _send_in_turn(self, turns: Sequence[Turn], buffers: Buffers, limit_bytes: int) -> None:
        buffers.begin()
        self._key = functools.partial(self._key_of, turns, buffers)
        keeps, before = self._fills.begin(self._key(), self._no_digests), 0
        recordable: dict[int, tuple[Turn, Bucket]] = {}
        with Delivery(turns, self._peers, self._deliver, send_stream(self._outgoing.device)) as delivery:
            delivery.open(self._failure is None)
            for number, turn in enumerate(turns):
                if turn.sender == self._peers.rank:
                    needs = turn.num_bytes + self._outgoing.fill_bytes(turn)
                    if max(needs, before) > limit_bytes:  # no room for another bucket in flight
                        delivery.wait(0)
                        if not keeps:
                            buffers.free()
                    delivery.wait(NUM_BUFFERS - 1)
                    make = buffers.alone if keeps and needs > limit_bytes else buffers.next
                    bucket = self._filled(number, turn, make)
                    delivery.send(number, bucket)
                    before = needs
                    if keeps and bucket is not None and needs <= limit_bytes:
                        recordable[number] = turn, bucket
                    del bucket  # else `buffers.free` would free nothing
                else:
                    self._take_part(turn)
            delivery.wait(0)
        self._failure = _first_cause([self._as_failure(delivery.failure), self._failure])
        if self._failure is None:
            self._fills.record(self._outgoing, recordable)
        self._times["send"] += delivery.seconds

    def _send_everywhere(self, turns: Sequence[Turn], buffers: Buffers) -> None:
        for turn in turns:
            bucket = buffers.next(turn.specs)
            if turn.sender == self._peers.rank:
                self._fill(turn, bucket)
            else:
                self._take_part(turn)
            with self._timed("send"):
                self._peers.share(bucket.flat, turn.sender)
                prepared = self._channel.prepare(bucket, self._receivers)
                if self._peers.conducts:
                    self._guarded(self._channel.deliver, prepared, self._receivers, version=self._version)

    def _take_part(self, turn: Turn) -> None:
        for _ in self._outgoing.tensors(turn):
            raise AssertionError("only the sender of a turn gets its tensors")

    def _filled(self, number: int, turn: Turn, make: Callable[[Sequence[Spec]], Bucket]) -> Bucket | None:
        """Returns a bucket filled with a turn's tensors, or None after any failure."""
        made: list[Bucket] = []
        if self._fills.holds(number):
            self._replayed.append(turn)
            return self._fills.replay(number) if self._failure is None else None
        self._guarded(lambda: made.append(make(turn.specs)))
        return made[0] if self._fill(turn, made[0] if made else None) else None

    def _fill(self, turn: Turn, bucket: Bucket | None) -> bool:
        """Computes the digests of a turn's tensors and copies the tensors into the bucket. Returns False after any
        failure.

        It iterates over all tensors even after a failure, because other ranks wait in the same collectives.
        """
        self._sent.append(turn)
        add, copy_all = (functools.partial(self._guarded, step) for step in (self._read, copy))
        try:
            fill_with(self._outgoing.tensors(turn), bucket, add, copy_all)
        except SlimeError as error:  # raised after the last tensor
            self._note(error)
        return bucket is not None and self._failure is None

    def _read(self, name: str, tensor: Any) -> None:
        with self._timed("digest"):
            self._expected.add(name, tensor)

    def _deliver(self, bucket: Bucket, stretch: Sequence[Turn]) -> None:
        """Sends a bucket. `stretch`: see `Delivery`. Runs in `Delivery`'s thread."""
        if not self._begun and not self._peers.conducts:
            self._begun = True
            self._channel.begin(self._receivers, version=self._version)
        if stretch:
            self._channel.announce(stretch, self._receivers, version=self._version)
        prepared = self._channel.prepare(bucket, self._receivers)
        self._channel.deliver(prepared, self._receivers, version=self._version)

    def _pause(self) -> None:
        """Pauses every engine. With `abort`, also ensures that no request is left."""
        self._causes.begin()
        with self._timed("pause"):
            on_all(self._receivers, lambda c: c.pause(self._pause_mode), "pause")
            self._causes.end("abort")
            if self._pause_mode == "abort":
                on_all(self._receivers, lambda c: c.flush_cache(), "flush the cache")
            self._causes.end("flush")
            on_all(self._receivers, lambda c: c.begin_update(), "begin a weight update")
            self._channel.begin(self._receivers, version=self._version)
            self._begun = True

    def agree(self) -> SlimeError | dict[str, float]:
        """Collective. Returns the failure or the timings, the same on all ranks."""
        parts = self._peers.gather(self._rank_report())
        outcome: SlimeError | dict[str, float] | None = None
        if parts is not None:
            self._failure = _first_cause([part.failure for part in parts])
            self._guarded(self._complete, parts)
            self._guarded(self._resume)
            outcome = self._failure or self._cost(parts)
        agreed: SlimeError | dict[str, float] = self._peers.broadcast(outcome)
        return agreed

    def _rank_report(self) -> _RankReport:
        if not self._sent and not self._replayed:
            return _RankReport(self._failure)
        digests: list[Digests] = []
        with self._timed("digest"):
            if self._sent:
                self._guarded(lambda: digests.append(self._expected.finish(_names(self._sent))))
            if self._replayed:
                self._guarded(lambda: digests.append(self._fills.digests(_names(self._replayed))))
        reports: list[Any] = []  # stays empty if the channel never began
        if self._begun:
            self._guarded(lambda: reports.append(self._channel.report()))
        report = reports[0] if reports else None
        seconds = self._times["send"], self._times["digest"]
        return _RankReport(self._failure, merged(digests), report, True, *seconds)

    def _complete(self, parts: Sequence[_RankReport]) -> None:
        """Completes the transfer and verifies every tensor on every rank of every engine."""
        expected = merged(part.digests for part in parts)
        with self._timed("send"):
            reports = [part.report for part in parts if part.sends]
            self._channel.finish(self._receivers, version=self._version, reports=reports)
        self._causes.end("transfer")
        with self._timed("verify"):
            told = on_all(self._receivers, lambda c: c.weight_checksums(), "report weight checksums")
            named = {
                receiver.control.url: (receiver.control.layout, report)
                for receiver, report in zip(self._receivers, told, strict=True)
            }
            require_equal(
                self._outgoing.table,
                expected,
                named,
                version=self._version,
                transport=type(self._channel).__name__,
                carried=self._carried,
            )
            on_all(self._receivers, lambda c: c.end_update(), "end the weight update")
        self._causes.end("verify")

    def _resume(self) -> None:
        on_all(self._receivers, lambda c: c.resume(), "resume")
        self._causes.end("admission")

    def _cost(self, parts: Sequence[_RankReport]) -> dict[str, float]:
        times = {**self._times, "digest": max(part.digest_s for part in parts)}
        times["send"] += sum(part.send_s for part in parts[1:])
        total = {"update_weights_time": time.monotonic() - self._started}
        seconds = {f"update_weights_{name}_time": value for name, value in times.items()}
        return {**total, **seconds, "update_weights_bytes": float(self._num_bytes), **self._causes.metrics()}

    def _guarded(self, step: Callable[..., Any], *args: Any, **named: Any) -> None:
        """Runs a step unless an earlier one failed. Records a failure for `agree`."""
        if self._failure is None:
            try:
                step(*args, **named)
            except Exception as error:
                self._note(error)

    def _note(self, error: BaseException | None) -> None:
        """Records the first failure of this rank."""
        self._failure = self._failure or self._as_failure(error)

    def _as_failure(self, error: BaseException | None) -> SlimeError | None:
        """Converts any error to one that can be sent to other ranks."""
        if error is None or isinstance(error, SlimeError):
            return error
        kind = type(error).__name__
        failure = WeightSyncError(f"weight sync of version {self._version} failed with {kind}: {error}")
        failure.__cause__ = error
        return failure

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Adds the block's duration to the time recorded for `name`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._times[name] += time.monotonic() - began


def _names(turns: Iterable[Turn]) -> list[str]:
    return [name for turn in turns for name in turn.hf_names]


def _first_cause(failures: Sequence[SlimeError | None]) -> SlimeError | None:
    """Returns the most likely root cause. Failures that name engines come first, timeouts last."""
    found = [failure for failure in failures if failure is not None]
    return min(found, key=lambda f: (not f.engines, isinstance(f, DeadlineExceeded)), default=None)
