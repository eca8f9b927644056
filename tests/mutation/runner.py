"""Runs tests against copies of the project, one forked process per copy. A program of its own: it must not import ours.

Reads jobs from standard input as JSON, `[{"name", "root", "tests", "stages"}]`; writes `{name: result}` to the file
given as its argument. The tests run once for each stage, an expression of pytest's `-m`, until a stage fails. The
parent imports the heavy packages once and every child inherits them. A child puts its copy first on `sys.path`, runs
pytest in it and checks that every module of slime came from the copy.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

PRELOAD = ("hypothesis", "numpy", "torch", "msgspec", "safetensors.torch", "transformers", "megatron.core.optimizer")
"""Only for speed."""
NUM_AT_ONCE = 2


class Failures:
    """pytest plugin: what failed, and with which exception."""

    def __init__(self) -> None:
        self.first: list[str] = []
        self.num_passed = 0

    def pytest_exception_interact(self, node: Any, call: Any) -> None:
        self.first.append(f"{node.nodeid}: {call.excinfo.typename}")

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.num_passed += report.when == "call" and report.passed


def child(job: dict[str, Any], out: Path) -> None:
    """Runs the tests of one copy and writes the result."""
    root = Path(job["root"])
    os.chdir(root)
    sys.path.insert(0, str(root))
    os.environ["PYTHONPATH"] = str(root)  # for what the tests start
    failures, text = Failures(), io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        options = ["-x", "-q", "-p", "no:cacheprovider", f"--rootdir={root}"]
        for selected in job["stages"]:
            code = int(pytest.main([*options, "-m", selected, *job["tests"]], plugins=[failures]))
            if code != 0:
                break
    modules = {n: getattr(m, "__file__", None) for n, m in sys.modules.items() if n.split(".")[0] in ("slime", "tests")}
    strangers = [f"{n} from {f}" for n, f in modules.items() if f and not Path(f).is_relative_to(root)]
    result = {
        "code": code,
        "failures": failures.first,
        "num_passed": failures.num_passed,
        "strangers": strangers,
        "num_modules": sum(n.startswith("slime.") for n in modules),
        "tail": text.getvalue()[-3000:],
    }
    out.write_text(json.dumps(result))


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Forks for one job and waits."""
    out, start = Path(job["root"]) / "result.json", time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            child(job, out)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"code": -1, "tail": "no result"}
    return result | {"wall_s": time.monotonic() - start}


def main() -> None:
    """Reads, runs, writes."""
    jobs = json.load(sys.stdin)
    for name in PRELOAD:
        importlib.import_module(name)
    assert not [n for n in sys.modules if n.split(".")[0] == "slime"], "slime was imported before any copy"
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        results = dict(zip([j["name"] for j in jobs], pool.map(run, jobs), strict=True))
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
