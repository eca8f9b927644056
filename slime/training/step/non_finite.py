"""Finds non-finite values at trained tokens, writes their samples to the run folder and stops the step.

A clamp or mask can hide a non-finite value from the loss, so the inputs of the loss are checked as well. Every rank
raises the same error before the weights change.

    <run dir>/non_finite/step_<rollout id>_rank_<rank>/
      samples.json           the samples, the tokens with a non-finite loss, and the values at these tokens
      tensors.safetensors    "<n>.<name>" for the n-th sample in the list: tokens [T]; all other tensors [R]

Each rank that finds non-finite values writes its own folder.

Invariants
1. A folder is complete or absent: it is written under a hidden name and then renamed. A folder is never replaced.
2. At most `MAX_SAMPLES` samples are written; samples.json has the total count.
3. A failed write is logged rather than raised, so it cannot hide the original error.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from safetensors.numpy import save_file
from torch import Tensor

from slime.algorithms.advantages import Arrays
from slime.algorithms.whole_batch import BatchLogProbs
from slime.core.batch import TrainBatch, TrainSample
from slime.core.errors import NumericsError
from slime.core.files import open_to_readers
from slime.core.sample import NOT_SAMPLED
from slime.training.step.micro_batch import MicroBatch, Places, PreparedBatch

logger = logging.getLogger(__name__)

MAX_SAMPLES = 8
MAX_OFFSETS = 32
"""Maximum number of offsets per sample in samples.json; the tensors have all of them."""

Array = npt.NDArray[Any]
PerSample = Mapping[int, Array] | Sequence[Array]
"""Sample position in the batch -> [R]."""


def dump_non_finite(
    run_dir: str | Path,
    batch: TrainBatch,
    offsets: Mapping[int, Sequence[int]],
    numbers: Mapping[str, PerSample | None],
    *,
    rank: int,
) -> Path | None:
    """Writes one rank's samples with a non-finite loss. Returns their folder, or None if the write failed.

    `offsets`: sample position in `batch` -> response tokens with a non-finite loss. `numbers`: name -> [R] per sample,
    in any float dtype (log-probs, advantages, weights, ...); None and missing positions are skipped.
    """
    if not offsets:
        return None
    chosen = sorted(offsets)[:MAX_SAMPLES]
    try:
        tensors: dict[str, Array] = {}
        records = []
        for n, position in enumerate(chosen):
            sample = batch.samples[position]
            own = _numbers_of(sample, position, numbers)
            records.append({"position": position, **_describe(sample, sorted(offsets[position]), own)})
            arrays = {"tokens": sample.tokens, "token_versions": sample.token_versions, "loss_mask": sample.loss_mask}
            arrays["offsets"] = np.asarray(sorted(offsets[position]), np.int64)
            tensors.update((f"{n}.{name}", np.ascontiguousarray(a)) for name, a in {**arrays, **own}.items())
        report = {"rollout_id": batch.rollout_id, "rank": rank, "num_non_finite": len(offsets), "samples": records}
        return _write(Path(run_dir) / "non_finite" / f"step_{batch.rollout_id}_rank_{rank}", report, tensors)
    except Exception:
        logger.exception("could not write the samples with a non-finite loss to %s", run_dir)
        return None


def _numbers_of(sample: TrainSample, position: int, numbers: Mapping[str, PerSample | None]) -> dict[str, Array]:
    out = {} if sample.rollout_log_probs is None else {"rollout_log_probs": sample.rollout_log_probs}
    for name, values in numbers.items():
        if values is not None and (not isinstance(values, Mapping) or position in values):
            out[name] = np.asarray(values[position])
    return out


def _describe(sample: TrainSample, offsets: Sequence[int], own: Mapping[str, Array]) -> dict[str, Any]:
    trained = sample.loss_mask > 0
    first = offsets[0]
    versions = np.unique(sample.token_versions[sample.token_versions != NOT_SAMPLED])
    return {
        "index": sample.index,
        "group_index": sample.group_index,
        "reward": _json_number(sample.reward),
        "truncated": sample.truncated,
        "num_tokens": sample.num_tokens,
        "response_length": sample.response_length,
        "weight_versions": versions.tolist(),
        "num_offsets": len(offsets),
        "offsets": list(offsets[:MAX_OFFSETS]),
        "first_token": int(sample.tokens[sample.num_tokens - sample.response_length + first]),
        "first_values": {name: _json_number(values[first]) for name, values in own.items()},
        "num_not_finite": {name: int((trained & ~np.isfinite(values)).sum()) for name, values in own.items()},
    }


def _json_number(value: Any) -> float | str:
    """Returns a float, or a string if the number is not finite, because JSON does not support such numbers."""
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _write(folder: Path, report: dict[str, Any], tensors: dict[str, Array]) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    partial.mkdir(exist_ok=True)
    save_file(tensors, partial / "tensors.safetensors")
    open_to_readers(partial / "tensors.safetensors")
    (partial / "samples.json").write_text(json.dumps(report, indent=1, allow_nan=False), encoding="utf-8")
    # A resumed run can find the same samples again; the first folder is not replaced.
    free, again = folder, 1
    while free.exists():
        again += 1
        free = folder.with_name(f"{folder.name}.{again}")
    partial.rename(free)
    return free


Offsets = Mapping[int, list[int]]
"""Sample position -> response tokens."""


KEPT_BYTES_PER_TOKEN = 5
"""Device memory that `Suspects` holds per response token until the step ends: a float32 score and a mask."""


class Suspects:
    """Non-finite values in one rank's micro-batches of a step. `add` and `any_found` do not wait for the device."""

    def __init__(self) -> None:
        self._seen: list[tuple[Places, Tensor, Tensor]] = []
        """Places of a micro-batch; mask of non-finite values, bool [R]; scores [R]."""

    def add(self, batch: MicroBatch, scores: Tensor, token_loss: Tensor) -> None:
        """Adds a micro-batch. scores [R]: the model's results. token_loss [R]: zero where masked. Both are detached."""
        engine = torch.where(batch.sampled > 0, batch.rollout_log_probs, torch.zeros_like(scores))
        inputs = (scores, engine, batch.old_log_probs, batch.ref_log_probs, batch.advantages)
        bad = torch.stack([~torch.isfinite(x) for x in inputs if x is not None]).any(0) & (batch.mask > 0)
        bad = bad | ~torch.isfinite(token_loss)
        self._seen.append((batch.places, bad, scores))

    def any_found(self) -> Tensor | None:
        """Returns whether any value is not finite, as a bool on the device, or None if nothing was added."""
        return torch.stack([bad.any() for _, bad, _ in self._seen]).any() if self._seen else None

    def offsets(self) -> dict[int, list[int]]:
        """Returns the tokens with non-finite values. Syncs with the device per micro-batch; check `any_found` first."""
        out: dict[int, list[int]] = {}
        for places, bad, _ in self._seen:
            for index in torch.nonzero(bad).flatten().tolist():
                position, offset = places.of_token(index)
                out.setdefault(position, []).append(offset)
        return out

    def scores(self) -> dict[int, np.ndarray[Any, Any]]:
        """Returns sample position -> the model's results [R]."""
        return {
            position: part.float().cpu().numpy()
            for places, _, scores in self._seen
            for position, part in zip(places.positions, scores.split(places.lengths), strict=True)
        }


def check_log_probs(
    prepared: PreparedBatch, log_probs: BatchLogProbs, values: Arrays | None, *, run_dir: str | None
) -> None:
    """Raises `NumericsError` on every rank if a log-prob or value at a trained token is not finite.

    Rank 0 writes the samples.
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
        parts = [finite for x in named.values() if x is not None and not (finite := np.isfinite(x[position])).all()]
        if parts and not (whole := np.all(parts, axis=0) | (sample.loss_mask == 0)).all():
            bad[position] = np.flatnonzero(~whole).tolist()
    if not bad:
        return
    folder = dump_non_finite(run_dir, prepared.batch, bad, named, rank=0) if run_dir and dist.get_rank() == 0 else None
    raise NumericsError(_message(names_of(prepared, bad), [folder]))


def dump(prepared: PreparedBatch, bad: Offsets, suspects: Suspects, *, run_dir: str | None) -> str | None:
    """Writes this rank's samples with a non-finite loss. Returns the folder, or None if nothing was written."""
    if not bad or not run_dir:
        return None
    log_probs, aims = prepared.log_probs, prepared.aims
    numbers: dict[str, Any] = {
        "scores": suspects.scores(),
        "old_log_probs": log_probs.old,
        "ref_log_probs": log_probs.ref,
        "advantages": aims.advantages if aims is not None else None,
        "weights": {position: prepared.weights[position].array() for position in bad},
    }
    folder = dump_non_finite(run_dir, prepared.batch, bad, numbers, rank=dist.get_rank())
    return None if folder is None else str(folder)


def raise_for(names: Iterable[str], folders: Iterable[object]) -> None:
    """Raises `NumericsError` if `names`, gathered from all ranks, is not empty."""
    found = list(names)
    if found:
        raise NumericsError(_message(found, folders))


def names_of(prepared: PreparedBatch, bad: Offsets) -> list[str]:
    samples = prepared.batch.samples
    return [
        f"sample {samples[position].index} of group {samples[position].group_index} from response token {min(found)} on"
        for position, found in sorted(bad.items())
    ]


def _message(names: list[str], folders: Iterable[object]) -> str:
    kept = ", ".join(str(folder) for folder in folders if folder)
    look = f"inspect them in {kept}" if kept else "inspect these samples"
    return (
        f"the loss is non-finite in {len(names)} samples: {'; '.join(names[:8])}; a log-prob, old log-prob or "
        f"advantage there is not finite; this step has not changed the weights; {look}"
    )
