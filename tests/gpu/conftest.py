"""What the tests of GPUs share: the figures that their report shows, and which of them stay together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

Figure = Callable[[str, float], None]


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps tests that share engines in one worker of pytest-xdist, and skips those that need more GPUs."""
    for item in items:
        if item.get_closest_marker("two_gpus") and torch.cuda.device_count() < 2:
            item.add_marker(pytest.mark.skip(reason="needs two GPUs"))
        if "cases" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Figure:
    """`figure(name, value)` puts a measured number into the report of `make test-gpu`."""
    return lambda name, value: record_property(name, float(value))
