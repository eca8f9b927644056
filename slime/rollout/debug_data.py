"""Recorded rollouts (`--save-debug-rollout-data`, `--load-debug-rollout-data`): zstd-compressed JSON lines, no pickle.

The first line names format and step; each further line is one group. Numbers survive exactly: JSON carries the
shortest text that reads back as the same float. A file appears whole or not at all.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import zstandard

from slime.core.batch import TrainBatch
from slime.core.errors import DataError
from slime.core.sample import Group, Sample

FORMAT = "slime-rollout"
VERSION = 1


def path_of(template: str, rollout_id: int | str) -> Path:
    """The file of one step or evaluation: `{rollout_id}` in the template replaced."""
    return Path(template.replace("{rollout_id}", str(rollout_id)))


def save_rollout(path: Path, rollout_id: int, groups: Sequence[Sequence[Sample]]) -> None:
    """Writes the groups of one step. Raises `DataError` if a sample holds something that is not JSON."""
    lines = [json.dumps({"format": FORMAT, "version": VERSION, "rollout_id": rollout_id})]
    try:
        for samples in groups:
            index = samples[0].group_index
            assert index is not None, f"a finished sample without group_index in step {rollout_id}"
            lines.append(Group(index, tuple(samples)).to_json(allow_nan=False))
    except (TypeError, ValueError) as problem:
        raise DataError(
            f"got a sample that cannot be recorded ({problem}); keep metadata, label and reward plain JSON"
        ) from problem
    _write_whole(path, zstandard.ZstdCompressor(level=6).compress(("\n".join(lines) + "\n").encode()))


def save_train_batch(path: Path, batch: TrainBatch) -> None:
    """Writes a batch as .npz: `<position>/<field of TrainSample>`, fields that are None left out; `rollout_id`."""
    arrays = {"rollout_id": np.asarray(batch.rollout_id)}
    for position, sample in enumerate(batch.samples):
        values = {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
        arrays |= {f"{position}/{name}": np.asarray(value) for name, value in values.items() if value is not None}
    other = sorted(name for name, array in arrays.items() if array.dtype.kind not in "biuf")
    assert not other, f"{other[:5]} are not numeric and would be written as a pickle"
    content = io.BytesIO()
    np.savez_compressed(content, **cast(Any, arrays))
    _write_whole(path, content.getvalue())


def head_and_tail(groups: list[list[Sample]], part: float | None) -> list[list[Sample]]:
    """The given part of the groups, at least one, half from each end; all without a part."""
    num = len(groups) if part is None else max(1, round(part * len(groups)))
    return groups[: (num + 1) // 2] + groups[len(groups) - num // 2 :]


def _write_whole(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_rollout(path: Path) -> tuple[int, list[list[Sample]]]:
    """-> (rollout_id, groups) as saved. Raises `DataError` if the file is missing, damaged or of another format."""
    try:
        with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
            lines = stream.read().decode().splitlines()
        header = json.loads(lines[0])
        if header.get("format") != FORMAT or header.get("version") != VERSION:
            raise DataError(
                f"got {path} of format {header.get('format')} {header.get('version')}; expected {FORMAT} {VERSION}"
            )
        groups = [list(Group.from_dict(json.loads(line)).samples) for line in lines[1:]]
    except FileNotFoundError:
        raise DataError(f"got no recorded rollout at {path}; check --load-debug-rollout-data and the step") from None
    except (zstandard.ZstdError, ValueError, KeyError, IndexError, AttributeError) as problem:
        if isinstance(problem, DataError):
            raise
        raise DataError(f"got a damaged recorded rollout at {path}: {type(problem).__name__}: {problem}") from problem
    return int(header["rollout_id"]), groups
