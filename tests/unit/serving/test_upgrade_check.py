"""What slime touches of the engines is tried, and what a newer version breaks is named."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from slime.cli.main import main
from slime.cli.upgrade_check import BAD, CHECKS, OK, Children, Row, Venv, as_table, named, read_report
from slime.compat import Hook
from slime.compat.touched import imported_names, sent_by_control, try_hook, try_name
from tests.support.documents import ROOT

FUNCTIONS = """
def two(first, second): ...
def three(first, second, third): ...
def named(first, *, place): ...
def all_of_it(*args, **kwargs): ...
"""


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "made_upstream.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    return "made_upstream"


@pytest.mark.parametrize(
    ("when", "target", "function", "said"),
    [
        ("BEFORE", "two", lambda first, second: None, ""),
        ("BEFORE", "two", lambda *_, **__: None, ""),
        ("AFTER", "two", lambda result, first, second: None, ""),
        ("AROUND", "three", lambda call, first, second, third: None, ""),
        ("BEFORE", "all_of_it", lambda first, *, place: None, ""),
        ("REPLACE", "named", lambda first, *, place: None, ""),
        ("BEFORE", "three", lambda first, second: None, "new positional arguments: third"),
        ("BEFORE", "two", lambda first, second, third: None, "requires 3 positional arguments, but the function has 2"),
        ("AROUND", "two", lambda call, first, second, *, place: None, "no longer has the arguments place"),
        ("BEFORE", "named", lambda first: None, "new keyword-only arguments: place"),
        ("BEFORE", "gone", lambda: None, "no attribute 'gone'"),
    ],
)
def test_a_hook_is_tried_with_the_arguments_of_its_target(
    upstream: str, when: str, target: str, function: Callable[..., Any], said: str
) -> None:
    found = try_hook("slime.compat.made", Hook(when, f"{upstream}.{target}", function))
    assert found is not None and (said in found.problem if said else not found.problem), found


def test_a_hook_that_the_installed_version_does_not_need_is_not_tried() -> None:
    assert try_hook("slime.compat.made", Hook("BEFORE", "sglang.gone", lambda: None, "<0.0.1")) is None


def test_names_come_from_the_import_statements(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f():\n    from sglang.srt import utils\nimport ray.util\nimport json\n")
    (tmp_path / "b.py").write_text("from transformers import Gone\n")
    assert set(imported_names(tmp_path)) == {("sglang.srt", "utils"), ("ray.util", ""), ("transformers", "Gone")}
    assert set(imported_names(tmp_path, {"b.py"})) == {("sglang.srt", "utils"), ("ray.util", "")}
    assert try_name("json", "loads").problem == "" and "no_such" in try_name("json", "no_such").problem


@pytest.mark.parametrize("version", ["0.5.16", "0.5.23"])
def test_routes_and_fields_are_those_that_the_control_sends(version: str) -> None:
    sent = {path: fields for _, path, fields in sent_by_control(version)}
    assert sent["/update_weights_from_disk"] == ("flush_cache", "model_path", "weight_version")
    assert ("/begin_weight_update" in sent) == (version == "0.5.23")


BROKEN = """
import dataclasses, json, sys
from slime.compat.sglang_cpu import activate
activate("cpu")
from sglang.srt.entrypoints import http_server
from sglang.srt.managers import io_struct
import sglang
from slime.compat import touched
routes = http_server.app.router.routes
next(r for r in routes if getattr(r, "path", "") == "/pause_generation").path = "/pause"
def abort(obj: io_struct.PauseGenerationReqInput): ...
next(r for r in routes if getattr(r, "path", "") == "/abort_request").endpoint = abort
@dataclasses.dataclass
class Flush:
    reason: str
def flush(obj: Flush): ...
next(r for r in routes if getattr(r, "path", "") == "/flush_cache").endpoint = flush
print(json.dumps([[f.what, f.problem] for f in touched.try_routes(sglang.__version__) if f.problem]))
"""


@pytest.mark.slow
def test_a_renamed_route_a_dropped_field_and_a_new_required_one_are_named() -> None:
    run = subprocess.run([sys.executable, "-c", BROKEN], cwd=ROOT, capture_output=True, text=True, check=True)
    found = dict(json.loads(run.stdout.strip().splitlines()[-1]))
    assert found.pop("POST /pause_generation") == "SGLang has no such route"
    (flushed,) = [found.pop(what) for what in [*found] if "/flush_cache" in what]
    assert flushed == "requires fields that slime does not send: reason"
    ((what, problem),) = found.items()
    assert what.startswith("POST /abort_request") and "abort_all" in problem


@pytest.mark.slow
def test_all_that_is_touched_exists_in_the_installed_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["upgrade-check", "--names-only"]) == 0, capsys.readouterr().out
    assert f"hooks {OK}" in capsys.readouterr().out


def test_the_table_says_what_passed_and_the_first_error(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure message="it | broke"/></testcase>'
        '<testcase name="c"><skipped/></testcase></testsuite></testsuites>'
    )
    row = read_report("sync", report, tmp_path / "log")
    assert row == Row("sync", 1, 1, "b: it | broke") and row.sign == BAD and Row("x", 1, 0).sign == OK
    assert list(as_table([row]))[-1] == f"| sync | {BAD} | 1 | 1 | b: it \\| broke |"
    touched = {
        "findings": [{"kind": "route", "what": "POST /a", "problem": "gone"}],
        **{"hooks that can go": ["h"], "patches that can go": []},
        "settings": {"sglang": {"came": ["x"], "went": []}},
    }
    text = "\n".join(named(["sglang==9"], touched))
    assert (
        "POST /a" in text and "hooks that can go (1):\n  - h" in text and "settings of sglang that came (1): x" in text
    )


def test_the_tests_of_the_table_exist() -> None:
    for tests in CHECKS.values():
        for test in tests:
            file, _, name = test.partition("::")
            assert f"def {name}" in (ROOT / file).read_text(), test


@pytest.mark.slow
def test_a_wheel_of_the_installed_version_is_what_is_tried_and_nothing_installed_changes(tmp_path: Path) -> None:
    """Also if another wheel of that version was tried in the same environment before."""
    import packaging

    installed = Path(packaging.__file__)
    before = installed.read_bytes()
    venv = Venv(tmp_path / "venv", Children())
    for text in ("first = 1", "second = 2"):
        assert venv.install([str(wheel(tmp_path, "packaging", metadata.version("packaging"), text))])
        found = subprocess.run([venv.python, "-c", "import packaging; print(packaging.__file__)"], capture_output=True)
        file = Path(found.stdout.decode().strip())
        assert file.is_relative_to(tmp_path) and file.read_text() == text
    assert installed.read_bytes() == before


def wheel(folder: Path, name: str, version: str, text: str) -> Path:
    """Writes a wheel with one module that holds `text`."""
    file, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}/__init__.py", text)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return file


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--output", "/proc/none/table.md"], "is not a folder"),
        (["nowhere.whl"], "neither PACKAGE==VERSION nor a wheel"),
        (["--names-only", "--only", "delta"], "drop one of them"),
        (["--venv", "."], "not a virtual environment"),
    ],
)
def test_what_could_only_fail_later_is_refused_at_once(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["upgrade-check", *words]) == 2
    assert said in capsys.readouterr().err
