"""The command line that tests of the configuration vary."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.settings.groups import cluster
from tests.support.command_line import complete


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default device is the CPU, also on a machine with GPUs."""
    monkeypatch.setattr(cluster, "has_gpu", lambda: False)


@pytest.fixture
def base(tmp_path: Path) -> list[str]:
    """A command line that is complete."""
    return complete(tmp_path)
