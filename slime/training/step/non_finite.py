"""Finds numbers that are not finite at trained tokens, keeps their samples in the run folder and stops the step.

A clamp or a mask may hide such a number from the loss, so what goes into the loss is looked at, too. Every rank raises
the same error, before the weights change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime.algorithms.advantages import Arrays
from slime.algorithms.whole_batch import BatchLogProbs
from slime.core.errors import NumericsError
from slime.training.step.micro_batch import MicroBatch, PreparedBatch
from slime.training.step.mismatch import locate
from slime.training.step.non_finite_dump import dump_non_finite

Offsets = Mapping[int, list[int]]
"""Sample position -> response tokens."""


class Suspects:
    """What one rank saw in its micro-batches of one step. Nothing waits for the device before `offsets`."""

    def __init__(self) -> None:
        self._seen: list[tuple[MicroBatch, Tensor, Tensor]] = []
        """Micro-batch, bool [R] where something is not finite, scores [R]."""

    def add(self, batch: MicroBatch, scores: Tensor, token_loss: Tensor) -> None:
        """scores: what the model answered [R]; token_loss [R], zero where masked; both detached."""
        engine = torch.where(batch.sampled > 0, batch.rollout_log_probs, torch.zeros_like(scores))
        inputs = (scores, engine, batch.old_log_probs, batch.ref_log_probs, batch.advantages)
        bad = torch.stack([~torch.isfinite(x) for x in inputs if x is not None]).any(0) & (batch.mask > 0)
        bad = bad | ~torch.isfinite(token_loss)
        self._seen.append((batch, bad, scores))

    def any(self) -> Tensor | None:
        """Whether something is not finite, a bool on the device; None if nothing was seen."""
        return torch.stack([bad.any() for _, bad, _ in self._seen]).any() if self._seen else None

    def offsets(self) -> dict[int, list[int]]:
        """Where something is not finite. Waits for the device once for each micro-batch: ask `any` before."""
        out: dict[int, list[int]] = {}
        for batch, bad, _ in self._seen:
            for index in torch.nonzero(bad).flatten().tolist():
                position, offset = locate(batch, index)
                out.setdefault(position, []).append(offset)
        return out

    def scores(self) -> dict[int, np.ndarray[Any, Any]]:
        """Sample position -> what the model answered [R]."""
        return {
            position: part.float().cpu().numpy()
            for batch, _, scores in self._seen
            for position, part in zip(batch.positions, scores.split(batch.lengths), strict=True)
        }


def check_log_probs(
    prepared: PreparedBatch, log_probs: BatchLogProbs, values: Arrays | None, *, run_dir: str | None
) -> None:
    """Raises `NumericsError` for a log-prob, or a value, that is not finite at a trained token.

    The same on every rank; rank 0 dumps.
    """
    named = {
        "old": log_probs.old,
        "old_full": log_probs.old_full,
        "ref": log_probs.ref,
        "teacher": log_probs.teacher,
        "values": values,
    }
    bad: dict[int, list[int]] = {}
    for position, sample in enumerate(prepared.batch.samples):
        parts = [np.isfinite(x[position]) for x in named.values() if x is not None]
        if parts and not (whole := np.all(parts, axis=0) | (sample.loss_mask == 0)).all():
            bad[position] = np.flatnonzero(~whole).tolist()
    if not bad:
        return
    folder = dump_non_finite(run_dir, prepared.batch, bad, named, rank=0) if run_dir and dist.get_rank() == 0 else None
    raise NumericsError(_message(names_of(prepared, bad), [folder]))


def dump(prepared: PreparedBatch, bad: Offsets, suspects: Suspects, *, run_dir: str | None) -> str | None:
    """Keeps this rank's samples with a non-finite loss; returns the folder, or None."""
    if not bad or not run_dir:
        return None
    log_probs, aims = prepared.log_probs, prepared.aims
    numbers: dict[str, Any] = {
        "scores": suspects.scores(),
        "old_log_probs": log_probs.old,
        "ref_log_probs": log_probs.ref,
        "advantages": aims.advantages if aims is not None else None,
        "weights": prepared.weights,
    }
    folder = dump_non_finite(run_dir, prepared.batch, bad, numbers, rank=dist.get_rank())
    return None if folder is None else str(folder)


def raise_for(names: Iterable[str], folders: Iterable[object]) -> None:
    """Raises `NumericsError` if there are names. Called with those of all ranks."""
    found = list(names)
    if found:
        raise NumericsError(_message(found, folders))


def names_of(prepared: PreparedBatch, bad: Offsets) -> list[str]:
    """Who they are, and from which response token on."""
    samples = prepared.batch.samples
    return [
        f"sample {samples[position].index} of group {samples[position].group_index} from response token {min(found)} on"
        for position, found in sorted(bad.items())
    ]


def _message(names: list[str], folders: Iterable[object]) -> str:
    kept = ", ".join(str(folder) for folder in folders if folder)
    look = f"look at them in {kept}" if kept else "look at these samples"
    return (
        f"got a non-finite loss in {len(names)} samples: {'; '.join(names[:8])}; because a log-prob, old log-prob or "
        f"advantage there is not finite; this step has changed no weight; {look}"
    )
