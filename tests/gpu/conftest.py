"""What the tests of GPUs share: the figures that their report shows, and which of them stay together."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from tests.gpu.run_gpu_tests import SPREAD

Figure = Callable[[str, float], None]


def pytest_configure() -> None:
    worker, gpus = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get(SPREAD)
    if worker and gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(str(n) for n in range(int(gpus)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[int(worker.removeprefix("gw")) % int(gpus)]


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps tests that share engines in one worker of pytest-xdist, and skips those that need more GPUs.

    Tests that share engines come first: their kernels take minutes to compile.
    """
    items.sort(key=lambda item: "cases" not in getattr(item, "fixturenames", ()))
    for item in items:
        if item.get_closest_marker("two_gpus") and torch.cuda.device_count() < 2:
            item.add_marker(pytest.mark.skip(reason="needs two GPUs"))
        if "cases" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Figure:
    """`figure(name, value)` puts a measured number into the report of `make test-gpu`."""
    return lambda name, value: record_property(name, float(value))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Prints at once why a test failed, because pytest does so only at the end, which a run may not reach."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.longreprtext[-4000:]}", flush=True)
