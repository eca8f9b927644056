"""The doctor names what is wrong and survives what it looks at."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime import __version__
from slime.cli.doctor import FAIL, MIN_MEMORY_BYTES, OK, check_import, check_loopback, find_all, how_to_install
from slime.cli.main import build_parser, main

ROOT = Path(__file__).parents[3]
WHEEL = f"slime-{__version__}-py3-none-any.whl"


def test_a_crashing_import_is_a_finding() -> None:
    finding = check_import("engine", "raise ImportError('no libfoo.so')")
    assert finding.state == FAIL and "no libfoo.so" in finding.detail
    assert check_import("engine", "import os; os.kill(os.getpid(), 9)").state == FAIL
    assert check_import("engine", "print('fine')") == type(finding)("engine", OK, "imports; fine")


def test_without_a_checkout_nobody_is_sent_to_its_makefile(tmp_path: Path) -> None:
    """Law: what is missing is installed by the Makefile in a checkout, and by pip where only the package is."""
    assert how_to_install("sglang") == "run: make venv"
    assert how_to_install("sglang", tmp_path).startswith("on a CPU: pip install --no-deps sglang==0.")
    assert how_to_install("ray", tmp_path) == (
        f"on a CPU: pip install '{WHEEL}[cpu]'; on GPUs: pip install '{WHEEL}[gpu]'"
    )


def test_the_installation_asks_for_the_memory_that_the_doctor_asks_for() -> None:
    asked = re.findall(r"(\d+) GB of free memory", (ROOT / "docs" / "install.md").read_text())
    assert asked == [str(MIN_MEMORY_BYTES // 10**9)]


def test_this_machine_is_looked_at_quickly() -> None:
    findings = {f.name: f for f in find_all("cpu", engines=False)}
    assert findings["device"].state == OK and findings["loopback"].state == OK
    assert {"python", "sglang", "megatron-core", "ray", "memory", "shared memory"} <= set(findings)


def test_findings_come_one_by_one_and_the_last_line_names_what_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[str] = []
    found = find_all("cpu", engines=True, begun=begun.append)
    next(found)
    assert begun == ["versions"], "nothing runs before it is asked for"
    monkeypatch.setattr("slime.cli.doctor.CHECKS", (check_loopback,))
    monkeypatch.setattr("slime.cli.doctor.socket.socket", lambda: 1 / 0)
    assert main(["doctor", "--no-engines", "--device", "cpu"]) == 1
    *_, line, last = capsys.readouterr().out.splitlines()
    assert line.split()[:2] == ["FAIL", "loopback"] and last == "these checks failed: loopback"


def test_a_folder_that_is_no_run_is_refused(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert main(["trace", str(tmp_path)]) == 2
    assert "pass the folder of a run" in capsys.readouterr().err


def test_every_command_has_help() -> None:
    help_text = build_parser().format_help()
    assert all(command in help_text for command in ("doctor", "report", "trace", "schemas"))


@pytest.mark.slow
def test_the_engines_import_here() -> None:
    findings = {f.name: f for f in find_all("auto", engines=True)}
    assert findings["megatron import"].state == OK, findings["megatron import"].detail
    assert findings["sglang import"].state == OK, findings["sglang import"].detail
    assert findings["kernels"].state == OK and "norm " in findings["kernels"].detail
