"""A full disk is named: the folder, and what is free there."""

from __future__ import annotations

import errno
import pickle
from pathlib import Path

import pytest
from safetensors import SafetensorError

from slime.core.errors import DiskFull
from slime.core.files import full_disk_named
from slime.observability.sinks import JsonlSink, StepRecord


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_names_the_folder_and_its_free_space(error: Exception, tmp_path: Path) -> None:
    """Law: whatever library finds the disk full, the message says where and how much is free; it crosses processes."""
    folder = tmp_path / "weights" / "not made yet"
    with (
        pytest.raises(DiskFull, match=rf"{folder} because its disk or quota is full \(.* GiB and .* free") as raised,
        full_disk_named(tmp_path),
        full_disk_named(folder),
    ):
        raise error
    assert raised.value.__cause__ is error
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_other_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), full_disk_named(tmp_path):
        (tmp_path / "missing").read_text()


def test_metrics_on_a_full_disk_end_the_run_by_name() -> None:
    with pytest.raises(DiskFull, match="cannot write to /dev"):
        JsonlSink(Path("/dev/full")).write(StepRecord("train", 0, {"train/loss": 1.0}))
