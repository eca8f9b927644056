"""Unit tests are pure: none leaves a trace in the process that the next one runs in."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest


def packages(modules: Iterable[str]) -> set[str]:
    """Those that the modules are in."""
    return {name.partition(".")[0] for name in modules}


@pytest.fixture(autouse=True)
def no_trace() -> Iterator[None]:
    """Law: environment, working folder and import path are after a test what they were before it.

    The other fixtures of a test, and so `monkeypatch`, are undone before this one looks. A package may set a variable,
    and setuptools the path to packages of its own, when it is first imported.
    """
    environment, folder, path, imported = dict(os.environ), Path.cwd(), list(sys.path), set(sys.modules)
    yield
    names = (environment.keys() | os.environ.keys()) - {"PYTEST_CURRENT_TEST"}
    changed = {name for name in names if environment.get(name) != os.environ.get(name)}
    added = [entry for entry in sys.path if entry not in path]
    if (changed or added) and packages(sys.modules) - packages(imported):
        changed &= environment.keys() | {"PYTHONPATH"}
        added = [entry for entry in added if "site-packages" not in entry]  # setuptools has packages of its own there
    for name in changed:
        os.environ.pop(name, None)
        if name in environment:
            os.environ[name] = environment[name]
    left = Path.cwd()
    os.chdir(folder)
    sys.path[:] = path
    assert not changed, f"left changed in the environment: {sorted(changed)}"
    assert left == folder, f"left in {left}"
    assert not added, f"left on sys.path: {added}"
