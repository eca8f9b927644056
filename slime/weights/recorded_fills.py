"""Repeats the GPU work of filling buckets from CUDA graphs, because launching it from Python takes longer than sending.

A bucket of an MoE model holds hundreds of tensors, and Python spends about 0.1 ms on each: it gathers the shards,
converts them, computes their digests and copies them. The first weight sync does all that as usual. The second one does
too, and at its end records the same work of each turn in a CUDA graph, which does not execute it. From the third sync
on, a turn is one launch.

Invariants
1. A graph is replayed only while everything whose address it contains is where it was: parameters, buckets, and the
   turns and engine layouts (`RecordedFills.begin`). Otherwise the next two syncs start from the beginning.
2. Recording changes nothing: if it fails, all later syncs run without graphs.
3. A turn that needs more memory than a bucket is filled as usual, so that graphs do not keep that memory.
4. A replayed digest reads the trainer's own tensors, as at first, and nothing is taken from an earlier sync but the
   positions of the tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.weights.engine_layout import UNREAD_BYTES, Digests, ExpectedDigests
from slime.weights.send_plan import Bucket, Outgoing, Turn

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    bucket: Bucket
    """What the graph fills."""


def fill(outgoing: Outgoing, turn: Turn, bucket: Bucket, expected: ExpectedDigests) -> None:
    """Adds a turn's tensors to `expected` and copies them into `bucket`."""
    fill_with(outgoing.tensors(turn), bucket, expected.add, copy)
    expected.read()


def fill_with(
    tensors: Iterable[tuple[str, Any]],
    bucket: Bucket | None,
    add: Callable[[str, Any], object],
    copy: Callable[[list[tuple[Any, Any]]], object],
) -> None:
    """Calls `add` for each tensor of the bucket, and `copy` for many (place in the bucket, tensor) pairs at a time.

    Takes all tensors even without a bucket, because other ranks wait in the same collectives.
    """
    views = dict(bucket.tensors) if bucket is not None else {}
    held: list[tuple[Any, Any]] = []
    held_bytes = 0
    for name, tensor in tensors:
        if name not in views:
            continue
        add(name, tensor)
        held.append((views[name], tensor))
        held_bytes += tensor.nbytes
        if held_bytes >= UNREAD_BYTES:
            copy(held)
            held, held_bytes = [], 0
    copy(held)


def copy(held: list[tuple[Any, Any]]) -> None:
    """Copies (place in the bucket, tensor) pairs with one call, because thousands of calls take longer than the
    copies."""
    import torch

    if held:
        with torch.no_grad():
            torch._foreach_copy_([place for place, _ in held], [tensor for _, tensor in held])


class RecordedFills:
    """The graphs of one training rank."""

    def __init__(self, *, on: bool) -> None:
        """`on`: whether to record anything. Buckets then keep their memory between weight syncs."""
        self._on = on
        self._key: Hashable = None
        self._num_syncs = 0
        """Number of finished weight syncs with this key."""
        self._turns: dict[int, _Recording] = {}
        self._expected: ExpectedDigests | None = None
        self._tables: object = None

    def begin(self, key: Hashable, make: Callable[[], ExpectedDigests]) -> bool:
        """Starts a weight sync. `key`: see invariant 1; None if nothing can be recorded. `make` creates digests of no
        tensors yet. Returns whether the buckets must stay where they are."""
        if key != self._key:
            self.forget()
        if self.records:
            self._expected = make()
        return self._on and key is not None

    def forget(self) -> None:
        """Frees all graphs and their memory."""
        self._key, self._num_syncs, self._expected, self._tables = None, 0, None, None
        self._turns.clear()

    @property
    def records(self) -> bool:
        return self._num_syncs == 1

    def end(self, key: Hashable, *, good: bool) -> None:
        """Ends a weight sync. `key` can differ from that of `begin`, because the sync allocated its buckets. A failed
        sync leaves nothing to replay."""
        if not good or key is None or not self._on or (self._num_syncs and key != self._key):
            self.forget()
        else:
            self._key, self._num_syncs = key, self._num_syncs + 1

    def holds(self, number: int) -> bool:
        """Returns whether `replay` can fill the bucket of turn `number`."""
        return self._num_syncs >= 2 and number in self._turns

    def replay(self, number: int) -> Bucket:
        """Fills the bucket of turn `number` again and returns it."""
        recording = self._turns[number]
        recording.graph.replay()
        return recording.bucket

    def digests(self, names: Iterable[str]) -> Digests:
        """Returns the digests of what the last replays read. `names`: all tensors of the recorded turns."""
        assert self._expected is not None, "nothing was recorded"
        return self._expected.finish(names)

    def record(self, outgoing: Outgoing, turns: Mapping[int, tuple[Turn, Bucket]]) -> None:
        """In the second weight sync, records how this rank fills the buckets of these turns (by number), without
        filling them.

        Nothing else may use the GPU meanwhile: streams come from a small pool, so another thread's stream can be the
        one that is recorded.
        """
        import torch

        if not self.records:
            return
        expected = self._expected
        assert expected is not None, "record before begin"
        stream, pool = torch.cuda.Stream(outgoing.device), torch.cuda.graph_pool_handle()
        stream.wait_stream(torch.cuda.current_stream(outgoing.device))
        try:
            with torch.cuda.stream(stream), expected.recording(outgoing.device) as self._tables:
                for number, (turn, bucket) in turns.items():
                    self._turns[number] = self._recorded(outgoing, turn, bucket, expected, pool)
            if not expected.is_complete:
                raise ValueError("a tensor of the engine has parts in several turns, and not all of them are recorded")
        except Exception as error:
            logger.warning("weight syncs run without CUDA graphs, because recording one failed: %s", error)
            self._on = False
            self.forget()

    @staticmethod
    def _recorded(outgoing: Outgoing, turn: Turn, bucket: Bucket, expected: ExpectedDigests, pool: Any) -> _Recording:
        import torch

        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            fill(outgoing, turn, bucket, expected)
        finally:
            graph.capture_end()
        return _Recording(graph, bucket)
