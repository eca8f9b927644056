"""The shared engine as a run finds it after its first weight sync."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engine_state import relabel


@pytest.fixture
def front(engine_server: Any) -> Any:
    """The engine, which serves as version 1."""
    relabel(engine_server.url, 1)
    return engine_server
