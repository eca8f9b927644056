"""What an engine of a pair needs of a machine: it is said before it starts, with what to install."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime.core.topology import Worker
from slime.serving.server import ON_A_CPU, PATIENT, environment, missing_here, pair_problem
from tests.support.fake_mooncake import write_mooncake


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where another Python looks for packages first."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_a_library_that_the_system_lacks_is_named_with_its_packages(folder: Path) -> None:
    said = "libibverbs.so.1: cannot open shared object file: No such file or directory"
    write_mooncake(folder, f"raise ImportError({said!r})")
    problem = pair_problem(Worker.DECODE, {}, "cpu") or ""
    assert re.search(rf"decode engine needs .*{said}; apt-get install .*libibverbs1", problem)
    assert pair_problem(Worker.REGULAR, {}, "cpu") is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_package_that_is_missing_is_named(folder: Path, device: str) -> None:
    write_mooncake(folder, "raise ImportError('no such module')")
    missing = missing_here("mooncake", device)
    assert missing is not None and "no such module; pip install mooncake-" in missing
    assert ("non-cuda" in missing) is (device == "cpu")


def test_what_loads_is_not_missing_and_backends_without_a_package_are_left_to_sglang(folder: Path) -> None:
    write_mooncake(folder, "")
    assert missing_here("mooncake", "cpu") is None and missing_here("ascend", "cuda") is None


def test_engines_of_one_host_tell_each_other_of_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SGLANG_HOST_IP", *PATIENT, *ON_A_CPU):
        monkeypatch.delenv(name, raising=False)
    assert environment(Worker.REGULAR, "cpu", "127.0.0.1") == {}
    assert environment(Worker.PREFILL, "cpu", "127.0.0.1") == {"SGLANG_HOST_IP": "127.0.0.1", **PATIENT, **ON_A_CPU}
    assert environment(Worker.DECODE, "cuda", "10.0.0.7") == {"SGLANG_HOST_IP": "10.0.0.7", **PATIENT}
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "rdma")
    assert "MOONCAKE_PROTOCOL" not in environment(Worker.DECODE, "cpu", "127.0.0.1"), "the user's own stays"
