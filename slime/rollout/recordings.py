"""Recorded rollouts (`--save-debug-rollout-data`, `--load-debug-rollout-data`): zstd-compressed JSON lines, no pickle.

The first line contains the format and the step; each following line is one group. Floats are stored exactly, and files
are written atomically.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import zstandard

from slime.core.batch import TrainBatch
from slime.core.errors import DataError
from slime.core.files import replace_bytes
from slime.core.sample import Group, Sample
from slime.rollout.guard import beside
from slime.rollout.sample_metrics import sample_metrics
from slime.rollout.transcript import refuse_unsampled
from slime.rollout.types import RolloutFnEvalOutput, RolloutFnTrainOutput, SampleGroup
from slime.settings import Args

FORMAT = "slime-rollout"
VERSION = 1


def path_of(template: str, rollout_id: int | str) -> Path:
    """Replaces `{rollout_id}` in a template with a step or the name of an evaluation."""
    return Path(template.replace("{rollout_id}", str(rollout_id)))


def save_rollout(path: Path, rollout_id: int, groups: Sequence[Sequence[Sample]]) -> None:
    """Writes the groups of a step. Raises `DataError` if a sample is not JSON-serializable."""
    lines = [json.dumps({"format": FORMAT, "version": VERSION, "rollout_id": rollout_id})]
    try:
        for samples in groups:
            index = samples[0].group_index
            assert index is not None, f"a finished sample without group_index in step {rollout_id}"
            lines.append(Group(index, tuple(samples)).to_json(allow_nan=False))
    except (TypeError, ValueError) as problem:
        raise DataError(
            f"a sample cannot be recorded ({problem}); its metadata, label and reward must be plain JSON"
        ) from problem
    _write(path, zstandard.ZstdCompressor(level=6).compress(("\n".join(lines) + "\n").encode()))


def save_train_batch(path: Path, batch: TrainBatch) -> None:
    """Writes a batch as .npz with `rollout_id`, and `<position>/<field of TrainSample>` for every field that is not
    None. `metadata` is JSON.
    """
    arrays = {"rollout_id": np.asarray(batch.rollout_id)}
    for position, sample in enumerate(batch.samples):
        values = {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
        values["metadata"] = None if sample.metadata is None else json.dumps(sample.metadata, allow_nan=False)
        arrays |= {f"{position}/{name}": np.asarray(value) for name, value in values.items() if value is not None}
    other = sorted(name for name, array in arrays.items() if array.dtype.kind not in "biufU")
    assert not other, f"{other[:5]} would be pickled"
    content = io.BytesIO()
    np.savez_compressed(content, **cast(Any, arrays))
    _write(path, content.getvalue())


def head_and_tail(groups: list[list[Sample]], part: float | None) -> list[list[Sample]]:
    """Returns a fraction `part` of the groups, half from each end, but at least one group; None: all groups."""
    num = len(groups) if part is None else max(1, round(part * len(groups)))
    return groups[: (num + 1) // 2] + groups[len(groups) - num // 2 :]


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(path, content)


def load_rollout(path: Path) -> tuple[int, list[list[Sample]]]:
    """Returns the step and its groups. Raises `DataError` if the file is missing, damaged or in another format."""
    try:
        with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
            lines = stream.read().decode().splitlines()
        header = json.loads(lines[0])
        if header.get("format") != FORMAT or header.get("version") != VERSION:
            raise DataError(
                f"{path} has format {header.get('format')} {header.get('version')}, but only {FORMAT} {VERSION} is "
                "supported; record the rollout again"
            )
        groups = [list(Group.from_dict(json.loads(line)).samples) for line in lines[1:]]
    except FileNotFoundError:
        raise DataError(
            f"there is no recorded rollout at {path}; check --load-debug-rollout-data and the step"
        ) from None
    except (zstandard.ZstdError, ValueError, KeyError, IndexError, AttributeError) as problem:
        if isinstance(problem, DataError):
            raise
        raise DataError(
            f"the recorded rollout {path} is damaged ({type(problem).__name__}: {problem}); record it again"
        ) from problem
    return int(header["rollout_id"]), groups


class Recorder:
    """Writes and reads the files of the debug settings."""

    def __init__(self, args: Args) -> None:
        self._args = args

    @property
    def replays(self) -> bool:
        """Whether steps are read from files instead of generated."""
        return self._args.load_debug_rollout_data is not None

    def replay(self, rollout_id: int) -> RolloutFnTrainOutput:
        """Reads a recorded step. Raises `DataError`."""
        assert self._args.load_debug_rollout_data is not None, "--load-debug-rollout-data is not set"
        _, groups = load_rollout(path_of(self._args.load_debug_rollout_data, rollout_id))
        groups = head_and_tail(groups, self._args.load_debug_rollout_data_subsample)
        refused = refuse_unsampled(self._args, rollout_id, groups)
        return RolloutFnTrainOutput(groups, {**sample_metrics(self._args, groups), **refused})

    async def save_rollout(self, rollout_id: int, groups: list[SampleGroup]) -> None:
        """Writes a step for `--save-debug-rollout-data`."""
        await self._save_groups(rollout_id, rollout_id, groups)

    async def save_evaluation(self, rollout_id: int, output: RolloutFnEvalOutput) -> None:
        """Writes an evaluation for `--save-debug-rollout-data`, one file per dataset."""
        for name, data in output.data.items():
            samples: Any = data.get("samples", ())
            await self._save_groups(f"eval_{rollout_id}_{name}", rollout_id, [[s] for s in samples])

    async def save_batch(self, rollout_id: int, batch: TrainBatch) -> None:
        """Writes a batch for `--save-debug-train-data`."""
        if self._args.save_debug_train_data is not None:
            path = path_of(self._args.save_debug_train_data, rollout_id)
            await beside(save_train_batch, path, batch)

    async def _save_groups(self, name: int | str, rollout_id: int, groups: list[SampleGroup]) -> None:
        """`name` replaces `{rollout_id}` in the path."""
        if self._args.save_debug_rollout_data is not None:
            path = path_of(self._args.save_debug_rollout_data, name)
            await beside(save_rollout, path, rollout_id, groups)
