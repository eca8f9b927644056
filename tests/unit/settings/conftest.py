"""The command line that tests of the configuration vary."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command_line import complete


@pytest.fixture
def base(tmp_path: Path) -> list[str]:
    """A command line that is complete."""
    return complete(tmp_path)
