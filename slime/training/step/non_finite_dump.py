"""Keeps the samples that made a loss non-finite, so that the error can be studied after the run has stopped.

    <run dir>/non_finite/step_<rollout id>_rank_<rank>/
      samples.json           who they are, where the loss is not finite, which of the numbers are not finite there
      tensors.safetensors    "<n>.<name>" for the n-th sample of the list: tokens [T]; all else [R]

Each rank that found some writes a folder of its own. `safetensors.numpy.load_file` reads the tensors.

Invariants
1. A folder is complete or absent: it is written under a hidden name and renamed. None is ever replaced.
2. At most `MAX_SAMPLES` samples are written; samples.json says how many there were.
3. A failure to write is logged and never raised: it must not hide the error that is being reported.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from slime.core.batch import TrainBatch, TrainSample
from slime.core.files import open_to_readers
from slime.core.sample import NOT_SAMPLED

logger = logging.getLogger(__name__)

MAX_SAMPLES = 8
MAX_OFFSETS = 32
"""Offsets written to samples.json for each sample; the tensors have all."""

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
    """Writes one rank's samples with a non-finite loss; returns their folder, or None if it could not be written.

    `offsets`: sample position in `batch` -> response tokens whose loss is not finite. `numbers`: name -> [R] of each
    sample, of any float dtype (log-probs, advantages, weights, ...); None or a missing position is left out.
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
        logger.exception("the samples with a non-finite loss could not be written below %s", run_dir)
        return None


def _numbers_of(sample: TrainSample, position: int, numbers: Mapping[str, PerSample | None]) -> dict[str, Array]:
    """Name -> [R] of one sample, the engine's log-probs among them."""
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
    """JSON has no NaN: what is not finite becomes its name."""
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _write(folder: Path, report: dict[str, Any], tensors: dict[str, Array]) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    partial.mkdir(exist_ok=True)
    save_file(tensors, partial / "tensors.safetensors")
    open_to_readers(partial / "tensors.safetensors")
    (partial / "samples.json").write_text(json.dumps(report, indent=1, allow_nan=False), encoding="utf-8")
    # A resumed run meets the same samples again: what the first one wrote stays.
    free, again = folder, 1
    while free.exists():
        again += 1
        free = folder.with_name(f"{folder.name}.{again}")
    partial.rename(free)
    return free
