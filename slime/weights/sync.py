"""The weight sync of one weight version: pause -> drain -> send -> verify -> resume.

Consumes the trainer's tensors, once, in table order. Produces engines that serve them, or the error that every rank
raises. Waits for each engine's answers, with the limit of its control, and for the other ranks; nobody wakes it.

Called collectively on every training rank: iterating the tensors is a collective of the trainer, so every rank walks
the whole stream even if the sender has already failed; at the end all ranks agree on the sender's outcome, and all
raise or none does.

Invariants
1. No engine serves between the first changed tensor and a verified digest of every tensor on every rank.
2. After a failure the engines stay paused; another weight sync may start from any such state.
3. Digests are taken of the trainer's own tensors, not of what travels; beside the model two buckets are
   alive, where its tensors are copies a third one.
4. No update flushes the engine's cache itself: an engine that finds running requests then dies. The cache is flushed,
   and thereby nothing is seen to run, after the pause; a paused engine admits no request that could fill it again.
   With `retract` and `in_place` requests stay, so nothing can be flushed. What such an engine has cached is divided by
   the weights that read it (`slime.compat.sglang_version_prefixes`): its scheduler counts the updates it is asked for,
   and a prefix is found under its count alone. So no two sets of weights share one: not those that are sent as the same
   `version`, by two runs or by a resumed one, and not those of a weight sync that failed and of the one that follows.
   Caches that are not divided, or that a flush does not empty, are refused
   (`slime.settings.groups.prefix_cache_rules`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from slime.core.errors import SlimeError, WeightSyncError
from slime.core.ports import Digest
from slime.models.common.table import FamilyTable
from slime.weights.buckets import Bucket, split
from slime.weights.engine_layout import ExpectedDigests
from slime.weights.receivers import Peers, Receiver, on_all
from slime.weights.transports import Channel
from slime.weights.verify import require_equal


def sync_weights(
    named_tensors: Iterable[tuple[str, Tensor]],
    *,
    table: FamilyTable,
    receivers: Sequence[Receiver],
    channel: Channel,
    digest: Digest,
    version: int,
    buffer_bytes: int,
    peers: Peers | None = None,
    pause_mode: str = "abort",
) -> dict[str, float]:
    """Sends `version` to all engines and returns its cost.

    `pause_mode`: what becomes of running requests: `abort`, `retract` or `in_place`.
    `named_tensors`: (HF name, full tensor) in the engine's dtype, the same stream on every training rank.

    Returns seconds and bytes: `update_weights_time` (all), `update_weights_pause_time`, `update_weights_send_time`,
    `update_weights_verify_time` (engines' digests and the comparison), `update_weights_digest_time` (the trainer's
    digests; overlaps sending on a CPU), `update_weights_bytes`. The rest of the total is iterating the tensors.
    Raises on every rank: `WeightSyncError` if an engine does not hold what was meant, `EngineError` or
    `DeadlineExceeded` if one cannot be reached.
    """
    peers = peers or Peers()
    run = _WeightSync(table, receivers, channel, digest, version, peers, pause_mode)
    buckets = split(named_tensors, buffer_bytes, table.together)
    if peers.is_sender:
        run.guarded(run.pause)
    for bucket in buckets:
        with run.timed("send"):
            prepared = channel.prepare(bucket, receivers)
        if peers.is_sender:
            run.guarded(run.send, bucket, prepared)
        del bucket, prepared  # or they would live while the next ones are made
    if peers.is_sender:
        run.guarded(run.complete)
        run.guarded(run.resume)
    outcome: SlimeError | dict[str, float] = peers.broadcast(run.outcome() if peers.is_sender else None)
    if isinstance(outcome, SlimeError):
        channel.abandon()
        raise outcome
    channel.settle()
    return outcome


class _WeightSync:
    """The sender's side of one weight sync."""

    def __init__(
        self,
        table: FamilyTable,
        receivers: Sequence[Receiver],
        channel: Channel,
        digest: Digest,
        version: int,
        peers: Peers,
        pause_mode: str,
    ) -> None:
        self._table, self._receivers, self._channel, self._version = table, receivers, channel, version
        self._pause_mode = pause_mode
        layouts = [receiver.control.layout for receiver in receivers] if peers.is_sender else []
        self._expected = ExpectedDigests(table, layouts, digest)
        self._failure: SlimeError | None = None
        self._started = time.monotonic()
        self._times = dict.fromkeys(("pause", "send", "verify", "digest"), 0.0)
        self._num_bytes = 0

    def guarded(self, step: Any, *args: Any) -> None:
        """Runs a step unless an earlier one failed; a failure is kept for the agreement at the end."""
        if self._failure is not None:
            return
        try:
            step(*args)
        except SlimeError as error:
            self._failure = error
        except Exception as error:
            kind = type(error).__name__
            self._failure = WeightSyncError(f"weight sync of version {self._version} failed with {kind}: {error}")
            self._failure.__cause__ = error

    def timed(self, name: str) -> _Timer:
        """Adds the seconds of a block to the cost of `name`."""
        return _Timer(self._times, name)

    def pause(self) -> None:
        """Stops every engine; with `abort`, ends its requests and sees that nothing runs any more."""
        with self.timed("pause"):
            on_all(self._receivers, lambda c: c.pause(self._pause_mode), "pause")
            if self._pause_mode == "abort":
                on_all(self._receivers, lambda c: c.flush_cache(), "flush the cache")
            self._channel.begin(self._receivers, version=self._version)

    def send(self, bucket: Bucket, prepared: Any) -> None:
        """Delivers one bucket; on a CPU the digests of the trainer's own tensors are taken meanwhile."""
        self._num_bytes += bucket.num_bytes
        if bucket.tensors[0][1].is_cuda:  # digests queue on the same device: no gain from a thread
            self._take_digests(bucket)
            with self.timed("send"):
                self._channel.deliver(prepared, self._receivers, version=self._version)
            return
        with ThreadPoolExecutor(1, thread_name_prefix="weights-digest") as pool, self.timed("send"):
            digests: Future[None] = pool.submit(self._take_digests, bucket)
            self._channel.deliver(prepared, self._receivers, version=self._version)
            digests.result()

    def _take_digests(self, bucket: Bucket) -> None:
        with self.timed("digest"):
            for name, tensor in bucket.tensors:
                self._expected.add(name, tensor)

    def complete(self) -> None:
        """Ends the transfer, then verifies every tensor of every rank of every engine."""
        expected = self._expected.finish()
        with self.timed("send"):
            self._channel.finish(self._receivers, version=self._version)
        with self.timed("verify"):
            reports = on_all(self._receivers, lambda c: c.weight_checksums(), "report weight checksums")
            named = {
                receiver.control.url: (receiver.control.layout, report)
                for receiver, report in zip(self._receivers, reports, strict=True)
            }
            require_equal(self._table, expected, named, version=self._version, transport=type(self._channel).__name__)

    def resume(self) -> None:
        """Lets every engine serve the verified version."""
        on_all(self._receivers, lambda c: c.resume(), "resume")

    def outcome(self) -> SlimeError | dict[str, float]:
        """What all ranks agree on: the failure, or the cost."""
        if self._failure is not None:
            return self._failure
        times = {f"update_weights_{name}_time": seconds for name, seconds in self._times.items()}
        total = time.monotonic() - self._started
        return {"update_weights_time": total, **times, "update_weights_bytes": float(self._num_bytes)}


class _Timer:
    """Adds the seconds of a block to one entry."""

    def __init__(self, times: dict[str, float], name: str) -> None:
        self._times, self._name = times, name

    def __enter__(self) -> None:
        self._begin = time.monotonic()

    def __exit__(self, *exc: object) -> None:
        self._times[self._name] += time.monotonic() - self._begin
