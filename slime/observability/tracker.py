"""`Tracker`: takes metrics of a step and hands them to every sink.

Called by the driver of the run alone (ranks and actors return their metrics to it), from one thread.

Invariants
1. The steps of one kind never go back; a repeated or earlier step is refused, except after a resume, which says so.
2. A view that fails (TensorBoard, W&B, the console) is dropped with one message and never ends the run; the JSONL file
   is the record, and its failure does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from slime.core.errors import DataError
from slime.observability.metrics import MetricValue, to_floats
from slime.observability.run_folder import RunFolder
from slime.observability.sinks import KINDS, JsonlSink, Sink, StepRecord

logger = logging.getLogger(__name__)


class Tracker:
    """Logs steps of one run."""

    def __init__(self, folder: RunFolder, sinks: Sequence[Sink] = ()) -> None:
        """`metrics.jsonl` of `folder` is always written; `sinks` are views beside it."""
        self.folder = folder
        self._sinks: list[Sink] = [JsonlSink(folder.metrics), *sinks]
        self._last_step: dict[str, int] = {}

    def log(self, kind: str, step: int, metrics: Mapping[str, MetricValue]) -> dict[str, float]:
        """Writes one step; returns the plain numbers. `kind`: "rollout", "train" or "eval".

        Raises `DataError` for an unknown kind, a name outside `group/name` and a step that goes back.
        """
        if kind not in KINDS:
            raise DataError(f"got step kind {kind!r}, because each kind is an axis; use one of {KINDS}")
        if step <= self._last_step.get(kind, -1) and kind != "eval":
            raise DataError(f"got {kind} step {step} after {self._last_step[kind]}, because steps only go on; log once")
        stray = sorted(name for name in metrics if "/" not in name or name == f"{kind}/step")
        if stray:
            raise DataError(
                f"got metrics named {stray}, because a name is group/name; do: add the group, drop the step"
            )
        self._last_step[kind] = step
        record = StepRecord(kind, step, to_floats(metrics))
        for sink in list(self._sinks):
            self._write(sink, record)
        return dict(record.metrics)

    def _write(self, sink: Sink, record: StepRecord) -> None:
        try:
            sink.write(record)
        except Exception:
            if sink.essential:
                raise
            logger.exception("%s failed and is dropped; metrics.jsonl goes on", type(sink).__name__)
            self._sinks.remove(sink)

    def close(self) -> None:
        """Ends every sink. Safe to call again."""
        for sink in self._sinks:
            try:
                sink.close()
            except Exception:
                logger.exception("closing %s failed", type(sink).__name__)
        self._sinks = []
