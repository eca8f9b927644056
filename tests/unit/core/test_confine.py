"""A process that is held reads what it named, writes where it may, and gets nothing else: `tests.support.escapes`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime.rewards.program_sandbox import missing_here
from tests.support.escapes import HEAVY_NAMES, QUICK_NAMES
from tests.support.marks import quick

PROGRAM = """
import sys
from slime.core.confine import ALL, READ, confine, readable_libraries

mine, scratch, secret = sys.argv[1:]
if not confine({**readable_libraries(), mine: READ, scratch: ALL}):
    print("no Landlock")
    raise SystemExit
for path, mode in ((mine, "r"), (scratch + "/new", "w"), (mine, "a"), (secret, "r"), (secret, "w")):
    try:
        open(path, mode).close()
        print("yes")
    except PermissionError:
        print("no")
"""


def test_what_is_not_named_is_out_of_reach(tmp_path: Path) -> None:
    """Law: a path has the rights that it was given, and what was not named has none."""
    for name in ("mine", "secret"):
        (tmp_path / name).write_text("x")
    (tmp_path / "scratch").mkdir()
    paths = [str(tmp_path / name) for name in ("mine", "scratch", "secret")]
    said = subprocess.run([sys.executable, "-c", PROGRAM, *paths], capture_output=True, text=True, check=True).stdout
    if said.strip() == "no Landlock":
        pytest.skip("the kernel has no Landlock")
    assert said.split() == ["yes", "yes", "no", "no", "no"]
    assert (tmp_path / "secret").read_text() == "x"


USER = 1_234_567
HIDDEN_GROUPS = "mount -t tmpfs none /sys/fs/cgroup && exec "
"""A machine whose control groups cannot be seen."""
UNHELD = {"memfd", "sysv_memory", "unix_socket_of_another", "loopback_of_the_host", "reads_the_secret"}
"""Some of the attempts that get something where nothing but its user holds a process."""
HOLDS = pytest.mark.usefixtures("something_holds")
AS = pytest.mark.parametrize(
    ("user", "prefix"), [(None, ""), (USER, ""), (None, HIDDEN_GROUPS)], ids=["root", "user", "no-groups"]
)


@pytest.fixture(scope="module")
def something_holds() -> None:
    if missing := missing_here():
        pytest.skip(f"nothing holds a program on this machine: {missing}")


def came_of(holder: str, kind: str, *, user: int | None = None, prefix: str = "") -> dict[str, str]:
    """Attempt -> outcome."""
    python, path = sys.executable, str(Path(__file__).parents[3])
    if user is not None:  # who may not be able to start this Python
        shared = [entry for entry in sys.path if "site-packages" in entry]
        python, path = "/usr/bin/python3", os.pathsep.join([path, *shared])
        like = subprocess.run([python, "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, text=True)
        if os.getuid() != 0 or like.stdout.strip() != str(sys.version_info[:2]):
            pytest.skip("needs root, and a Python of the system's that is like this one")
    command = [python, "-m", "tests.support.escapes", holder, kind]
    if prefix:
        command = ["unshare", "-m", "sh", "-c", f'{prefix} "$@"', "sh", *command]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    given: dict[str, Any] = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/", **given)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def held(said: dict[str, str], names: list[str]) -> None:
    assert sorted(said) == sorted(names)
    assert {name: why for name, why in said.items() if not why.startswith("held")} == {}


def test_the_document_counts_the_attempts() -> None:
    text = " ".join(Path(__file__).parents[3].joinpath("docs/graders.md").read_text().split())
    assert f"contains {len(QUICK_NAMES + HEAVY_NAMES)} attempts" in text
    assert f"{len(QUICK_NAMES)} of the attempts need no additional process" in text


@HOLDS
@pytest.mark.parametrize("holder", quick(["grader", "agent", "text"], "agent"))
def test_no_attempt_to_escape_gets_anything(holder: str) -> None:
    """Law: a program, an agent's command, or an answer that took over its grader gets nothing."""
    held(came_of(holder, "quick"), QUICK_NAMES)


@pytest.mark.slow
@HOLDS
@AS
@pytest.mark.parametrize("holder", ["grader", "agent"])
def test_no_attempt_gets_more_than_its_share(holder: str, user: int | None, prefix: str) -> None:
    """Law: processes, threads, memory of all together, files: bounded for all users, with control groups or not."""
    held(came_of(holder, "heavy", user=user, prefix=prefix), HEAVY_NAMES)


@pytest.mark.slow
@HOLDS
@AS
@pytest.mark.parametrize("holder", ["grader", "agent", "text"])
def test_nor_as_another_user_or_without_control_groups(holder: str, user: int | None, prefix: str) -> None:
    """Law: the same holds for a user who is not root, and where control groups cannot be seen."""
    held(came_of(holder, "quick", user=user, prefix=prefix), QUICK_NAMES)


@pytest.mark.slow
def test_the_attempts_get_something_where_nothing_holds_them() -> None:
    """Law: they are attempts: a process that is held by its user alone gets what most of these are after."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become a user without rights")
    got = {name for name, what in came_of("nobody", "quick").items() if what.startswith("got")}
    assert got >= UNHELD and len(got) > 25, sorted(got)
