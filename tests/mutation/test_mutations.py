"""The suite notices known bugs: each is put back into a copy of the project, and the copy's tests must fail.

The control, a copy without a bug, must pass, so a failure is the bug's. A mutated copy must fail in an assertion of a
test that ran, not by an error of import or syntax.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.mutation.mutations import MUTATIONS
from tests.mutation.record import LEFT_OUT, SUITES, Mutation

ROOT = Path(__file__).parents[2]
UNIT_ROOMS = (
    "algorithms",
    "buffer",
    "cluster",
    "data",
    "fleet",
    "rewards",
    "rollout",
    "serving",
    "training",
    "weights",
)
COPIED = (
    *("slime", "docs", "examples", "tests/support", "tests/contract/training"),
    *(f"tests/unit/{room}" for room in UNIT_ROOMS),
)
COPIED_FILES = (
    *("pyproject.toml", "train_async.py"),
    *("tests/__init__.py", "tests/conftest.py", "tests/contract/conftest.py"),
)
TIMEOUT_S = 7200
CONTROL = "control"
SEEN_AS = ("AssertionError", "Failed", "ExceptionGroup", "FlakyFailure", "GroupsFailed")
"""Exceptions with which a test says that a law is broken, and that with which the rollout says it of its samples."""


def files_of(suite: str) -> list[str]:
    """Files of a suite, relative to the project."""
    files = [p for pattern in SUITES[suite] for p in sorted(ROOT.glob(pattern)) if p.name not in LEFT_OUT]
    # Samples of 100,000 come last: most bugs are found before.
    files.sort(key=lambda p: p.name == "test_toy_enumeration.py")
    return [p.relative_to(ROOT).as_posix() for p in files]


def mutated(text: str, mutation: Mutation) -> str:
    """The text with the bug. Raises `AssertionError` if the place is not found exactly once."""
    count = text.count(mutation.before)
    assert count == 1, f"{mutation.file} has {count} places like {mutation.before!r}; the mutation must be renewed"
    return text.replace(mutation.before, mutation.after)


def make_copy(base: Path, root: Path, mutation: Mutation | None) -> None:
    shutil.copytree(base, root)
    if mutation is not None:
        path = root / "slime" / mutation.file
        path.write_text(mutated(path.read_text(), mutation))


def _names(items: list[pytest.Item]) -> list[str]:
    """Mutations that this session has selected."""
    params = [i.callspec.params for i in items if hasattr(i, "callspec") and i.path == Path(__file__)]
    return sorted({str(p["name"]) for p in params if "name" in p})


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Name of the selected mutation or control -> what happened."""
    folder = tmp_path_factory.mktemp("mutation")
    base = folder / "base"
    for name in COPIED:
        shutil.copytree(ROOT / name, base / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in COPIED_FILES:
        shutil.copy2(ROOT / name, base / name)
    names = _names(request.session.items)
    suites = {f"{CONTROL} {suite}": (suite, None) for suite in {MUTATIONS[n].suite for n in names}}
    wanted = suites | {n: (MUTATIONS[n].suite, MUTATIONS[n]) for n in names}
    jobs = []
    for number, (name, (suite, mutation)) in enumerate(wanted.items()):
        root = folder / str(number)
        try:
            make_copy(base, root, mutation)
        except AssertionError:
            continue  # its own test says so
        stages = ["not slow"] if mutation is None else ["not slow", "slow"]
        jobs.append({"name": name, "root": str(root), "tests": files_of(suite), "stages": stages})
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTHONPATH", None)
    out = folder / "results.json"
    command = [sys.executable, str(Path(__file__).with_name("runner.py")), str(out)]
    run = subprocess.run(
        command, input=json.dumps(jobs), text=True, cwd=folder, env=environment, timeout=TIMEOUT_S, capture_output=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(out.read_text())
    return found


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_suite_notices(name: str, results: dict[str, dict[str, Any]]) -> None:
    mutation = MUTATIONS[name]
    mutated((ROOT / "slime" / mutation.file).read_text(), mutation)
    control, got = results[f"{CONTROL} {mutation.suite}"], results[name]
    assert control["code"] == 0, f"the tests fail without any bug:\n{control['tail']}"
    for result in (control, got):
        assert result["num_modules"] > 0 and not result["strangers"], f"not the copy was tested: {result['strangers']}"
    assert got["code"] == 1, f"{name}: pytest ended with {got['code']}, so nothing noticed:\n{got['tail']}"
    seen = got["failures"]
    assert seen and seen[0].split(": ")[-1] in SEEN_AS, f"{name}: it broke by accident: {seen}\n{got['tail']}"


def test_a_mutation_that_no_longer_fits_is_an_error() -> None:
    for mutation in MUTATIONS.values():  # the slow ones, too, whoever changes the code
        mutated((ROOT / "slime" / mutation.file).read_text(), mutation)
    stale = Mutation("data", "core/processes.py", "a line that is nowhere", "x")
    with pytest.raises(AssertionError, match="must be renewed"):
        mutated("a = 1\n", stale)
