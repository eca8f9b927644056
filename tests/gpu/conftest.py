"""What the tests of GPUs share: the figures that their report shows, and which of them stay together."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Figure = Callable[[str, float], None]


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps tests that share engines in one worker of pytest-xdist."""
    for item in items:
        if "cases" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Figure:
    """`figure(name, value)` puts a measured number into the report of `make test-gpu`."""
    return lambda name, value: record_property(name, float(value))
