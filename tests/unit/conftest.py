"""Unit tests are pure: none leaves a trace in the process that the next one runs in."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_trace() -> Iterator[None]:
    """Law: environment, working folder and import path are after a test what they were before it.

    The other fixtures of a test, and so `monkeypatch`, are undone before this one looks.
    """
    environment, folder, path = dict(os.environ), Path.cwd(), list(sys.path)
    yield
    changed = sorted(
        name for name in environment.keys() | os.environ.keys() if environment.get(name) != os.environ.get(name)
    )
    changed = [name for name in changed if name != "PYTEST_CURRENT_TEST"]
    left = Path.cwd()
    for name in changed:
        os.environ.pop(name, None)
        if name in environment:
            os.environ[name] = environment[name]
    os.chdir(folder)
    added, sys.path[:] = [entry for entry in sys.path if entry not in path], path
    assert not changed, f"left changed in the environment: {changed}"
    assert left == folder, f"left in {left}"
    assert not added, f"left on sys.path: {added}"
