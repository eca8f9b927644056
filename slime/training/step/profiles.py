"""Profiles of selected training steps, and the GPU memory history.

    <run dir>/profiles/step_10_train_overall_rank_0.json.gz     a Chrome trace from torch's profiler
    <run dir>/memory/step_10_rank_0_snapshot.pickle             an allocator snapshot for pytorch.org/memory_viz

Invariants
1. Steps that are not selected run as if there were no profiler.
2. A file gets its final name only once it is complete.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch

from slime.settings import Args

logger = logging.getLogger(__name__)

Target = Literal["train_overall", "train_actor", "train_log_probs"]

HISTORY_ENTRIES = 1_000_000
"""Number of recent allocator events to keep. They take up a few hundred megabytes of host memory."""


class Profiles:
    """One training rank's profiles. Must be created before the model, so that the memory history includes it."""

    def __init__(self, args: Args, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._traces = Path(args.run_dir or ".") / "profiles"
        traced = args.use_pytorch_profiler and rank in args.profile_ranks
        self._steps = range(args.profile_step_start, args.profile_step_end) if traced else range(0)
        self._asked = frozenset(args.profile_target)
        self._shapes, self._stack = args.pytorch_profiler_collect_shapes, args.pytorch_profiler_collect_callstack
        self._tracing = False
        self._snapshots = Path(args.memory_snapshot_dir or Path(args.run_dir or ".") / "memory")
        self._ending, self._steps_left = args.memory_snapshot_path, args.memory_snapshot_num_steps
        self._records = args.record_memory_history
        if self._records:
            torch.cuda.memory._record_memory_history(max_entries=HISTORY_ENTRIES)

    @contextmanager
    def step(self, rollout_id: int) -> Iterator[None]:
        try:
            with self.part("train_overall", rollout_id):
                yield
        except torch.OutOfMemoryError:
            self._snapshot(rollout_id)
            raise
        if self._records and self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left == 0:
                self._snapshot(rollout_id)
                torch.cuda.memory._record_memory_history(enabled=None)
                self._records = False

    def part(self, target: Target, rollout_id: int) -> AbstractContextManager[Any]:
        """Returns a context manager that traces `target`, marks it in the running trace, or does nothing."""
        if rollout_id not in self._steps:
            return nullcontext()
        if self._tracing:
            return torch.profiler.record_function(target)
        return self._trace(target, rollout_id) if target in self._asked else nullcontext()

    @contextmanager
    def _trace(self, target: Target, rollout_id: int) -> Iterator[None]:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._tracing = True
        try:
            with torch.profiler.profile(
                activities=kinds, record_shapes=self._shapes, with_stack=self._stack
            ) as profiler:
                yield
                if self._device.type == "cuda":
                    torch.cuda.synchronize()  # so that the trace includes the kernels of this step
        finally:
            self._tracing = False
        path = self._traces / f"step_{rollout_id}_{target}_rank_{self._rank}.json.gz"
        self._write(path, profiler.export_chrome_trace)

    def _snapshot(self, rollout_id: int) -> None:
        if self._records:
            path = self._snapshots / f"step_{rollout_id}_rank_{self._rank}_{self._ending}"
            self._write(path, torch.cuda.memory._dump_snapshot)

    @staticmethod
    def _write(path: Path, write: Callable[[str], None]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}")
        write(str(part))
        os.replace(part, path)
        logger.info("wrote %s", path)
