"""A container's CPU quota counts as cores, its stalls make limits longer, and freed memory is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime.core import cores
from slime.core.cores import KEPT_MEMORY, memory_variables, stalled_share, usable_cores
from slime.core.liveness import MOST_LOAD, load

OWN = "0::/pod/worker\n"
PRESSURE = "some avg10=1.00 avg60=90.00 avg300=1.00 total=9\nfull avg10=1.00 avg60={:.2f} avg300=1.00 total=9\n"


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The top of the control groups of an idle host of 64 cores, on which this process is in `/pod/worker`."""
    (tmp_path / "own").write_text(OWN)
    monkeypatch.setattr(cores, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(cores, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "getloadavg", lambda: (8.0, 8.0, 8.0))
    return tmp_path / "cgroup"


def written(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("own", "files", "allowed"),
    [
        (OWN, {}, 64),
        (OWN, {"pod/worker/cpu.max": "max 100000\n"}, 64),
        (OWN, {"pod/worker/cpu.max": "max 100000\n", "pod/cpu.max": "150000 100000\n"}, 2),
        (OWN, {"cpu.max": "20000 100000\n"}, 1),
        ("3:cpu,cpuacct:/docker/1\n2:cpuset:/\n", {"cpu/cpu.cfs_quota_us": "400000\n"}, 64),
        (
            "3:cpu,cpuacct:/docker/1\n0::/\n",
            {"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            4,
        ),
        ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
    ],
)
def test_a_quota_of_the_group_or_of_one_above_it_counts(
    groups: Path, own: str, files: dict[str, str], allowed: int
) -> None:
    cores.OWN_CGROUPS.write_text(own)
    for name, text in files.items():
        written(groups / name, text)
    assert usable_cores() == allowed


def test_limits_grow_while_a_quota_stops_everybody(groups: Path) -> None:
    """The load average is the host's: eight threads on 64 cores. They are to share two, and stand still for 75 %."""
    assert (stalled_share(), load()) == (0.0, 1.0)
    written(groups / "cpu.pressure", PRESSURE.format(75))  # a container that has its own group at the top
    assert (stalled_share(), load()) == (0.75, 4.0)
    written(groups / "pod/worker/cpu.pressure", PRESSURE.format(100))
    assert load() == MOST_LOAD


TOUCHES = """
import ctypes, resource, sys
if "here" in sys.argv:
    from slime.core.cores import keep_freed_memory
    keep_freed_memory()
c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes, c.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
c.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def touch():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = c.malloc(1 << 26); c.memset(block, 1, 1 << 26); c.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(touch() > 0, touch() == 0)
"""


@pytest.mark.parametrize(
    ("words", "variables", "kept"), [([], {}, False), (["here"], {}, True), ([], KEPT_MEMORY, True)]
)
def test_freed_memory_is_kept_here_or_in_a_new_process(words: list[str], variables: dict[str, str], kept: bool) -> None:
    """The second time that 64 MB are filled, no page is new."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", TOUCHES, *words]
    ran = subprocess.run(command, env=environment | variables, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["True", str(kept)]


def test_the_users_word_on_memory_stands() -> None:
    assert memory_variables({}) == KEPT_MEMORY and not memory_variables({"MALLOC_MMAP_MAX_": "9"})
