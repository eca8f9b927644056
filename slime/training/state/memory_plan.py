"""The peak of GPU memory in each phase of a colocated step, from sizes that are known when everything is built.

    train        the trainer alone: weights, gradients, optimizer, and the activations of the largest micro-batch, which
                 a rehearsal measures (`slime.training.rehearsal`)
    sync         the trainer's weights and two buckets, beside the weights of the engine
    generate     the engine alone: its pool, which holds weights and cache

Pure. Bytes throughout, of one rank and the GPU that it shares.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.models.common.table import FamilyTable
from slime.weights.quantised.formats import QuantisedFormat


@dataclass(frozen=True, slots=True)
class RankBytes:
    """What one training rank keeps on its GPU between two calls."""

    weights: int
    """Of the policy; adapters and what is frozen among them."""
    gradients: int
    """Of the policy and of a critic."""
    others: int
    """Optimizer states (master weights, moments) and all of a critic but its gradients; moments that Adam makes in its
    first step are counted from the beginning."""


@dataclass(frozen=True, slots=True)
class EngineBytes:
    """What one engine rank keeps on the same GPU."""

    weights: int
    pool: int | None
    """Weights and cache together, `mem_fraction_static` of the GPU; None where SGLang chooses the fraction."""


@dataclass(frozen=True, slots=True)
class Peak:
    """Of one phase."""

    trainer: int
    engine: int | None
    """None: not known before the engine has chosen."""

    def __str__(self) -> str:
        engine = "as SGLang chooses" if self.engine is None else f"{self.engine / 1e9:.1f} GB"
        parts = [f"trainer {self.trainer / 1e9:.1f} GB"] if self.trainer else []
        return " + ".join(parts + ([f"engine {engine}"] if self.engine != 0 else []))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Of one training rank."""

    gpu_bytes: int
    """Of the whole GPU."""
    peaks: Mapping[str, Peak]
    """By phase."""

    def with_training(self, num_bytes: int) -> MemoryPlan:
        """The same plan with what training takes, activations included."""
        return MemoryPlan(self.gpu_bytes, {**self.peaks, "train": Peak(num_bytes, 0)})

    def too_large(self) -> list[str]:
        """Phases that do not fit."""
        return [phase for phase, peak in self.peaks.items() if peak.trainer + (peak.engine or 0) > self.gpu_bytes]

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        return {"gpu_bytes": self.gpu_bytes} | {phase: dataclasses.asdict(peak) for phase, peak in self.peaks.items()}

    def __str__(self) -> str:
        return "; ".join(f"{phase}: {peak}" for phase, peak in self.peaks.items())


def predicted_peaks(rank: RankBytes, engine: EngineBytes, *, bucket_bytes: int) -> dict[str, Peak]:
    """Phase -> its peak; of training without activations, until they are known.

    Two buckets of a weight sync are alive, no larger than all; what ranks gather for them is counted in.
    """
    return {
        "train": Peak(rank.weights + rank.gradients + rank.others, 0),
        "sync": Peak(rank.weights + 2 * min(bucket_bytes, engine.weights), engine.weights),
        "generate": Peak(0, engine.pool),
    }


def engine_bytes(
    table: FamilyTable,
    *,
    itemsize: int,
    tp_size: int,
    gpu_bytes: int,
    fraction: float | None,
    quantised: QuantisedFormat | None = None,
) -> EngineBytes:
    """An engine rank's share of a model whose tensors are `itemsize` bytes wide (float32 where they are wide), or
    `quantised`.

    Padding, and what an engine does not split, are left out: the share is a little low.
    """
    total = 0
    for entry in table.entries:
        row = entry.row
        if quantised is not None and quantised.is_quantised(entry.hf):
            parts = zip(quantised.rows(row), quantised.dtypes, strict=True)
            total += sum(dtype.itemsize * sum(map(math.prod, part.shapes)) for part, dtype in parts)
        else:
            total += (4 if row.wide else itemsize) * sum(map(math.prod, row.shapes))
    return EngineBytes(-(-total // tp_size), None if fraction is None else int(gpu_bytes * fraction))
