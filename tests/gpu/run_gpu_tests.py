"""Runs the tests of this folder side by side and writes a report: `python tests/gpu/run_gpu_tests.py [--out FOLDER]`.

The report is a JSON file and the same as a Markdown table: the machine, the versions, and each test with its result,
seconds and measured figures. A test that needs two GPUs and finds one is listed as not run. Everything after `--` goes
to pytest, for example `-- -k partition`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from slime.observability.run_folder import versions

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "sglang", "sglang-kernel", "flashinfer-python", "megatron-core", "transformers", "ray")
SEVERAL = re.compile(r"\[.*\]$")
GROUP = re.compile(r"@\w+$")
"""What pytest-xdist adds to the names of tests that it keeps together."""
SPREAD = "SLIME_TEST_GPUS"
"""The number of GPUs among which the workers of pytest-xdist are spread, one GPU for each worker."""
NOTHING_SELECTED = 5
"""pytest's exit code if `-k` leaves no test of a part."""


@dataclass(frozen=True)
class Result:
    """One test of the report."""

    file: str
    test: str
    outcome: str
    """"passed", "failed" or "not run"."""
    seconds: float
    figures: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    """Why it failed or did not run."""


def results_of(report: Path) -> list[Result]:
    """The tests in a JUnit file of pytest."""
    found = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        problem = next((e for e in case if e.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if problem is None else "not run" if problem.tag == "skipped" else "failed"
        figures = {p.get("name", ""): float(p.get("value", "nan")) for p in case.iter("property")}
        reason = "" if problem is None else (problem.get("message") or "").split("\n")[0][:300]
        file = case.get("classname", "").split(".")[-1] + ".py"
        name = GROUP.sub("", case.get("name", ""))
        found.append(Result(file, name, outcome, float(case.get("time", 0)), figures, reason))
    return found


def machine() -> dict[str, Any]:
    """The GPUs, the driver and the versions of what runs on them."""
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.split("\n")[0]
    installed = versions(PACKAGES)
    return {
        "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
        "driver": driver,
        "cuda": torch.version.cuda,
        "python": installed.pop("python"),
        "packages": installed,
    }


def table_of(results: list[Result]) -> str:
    """One row per test function: how many of its cases passed, seconds in all, and the largest of each figure."""
    lines = ["| test | passed | s | figures |", "|---|---|---|---|"]
    functions: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        functions.setdefault((result.file, SEVERAL.sub("", result.test)), []).append(result)
    for (file, test), cases in functions.items():
        passed = sum(case.outcome == "passed" for case in cases)
        known = [case for case in cases if case.outcome != "not run"]
        share = f"{passed} of {len(known)}" if known else f"not run: {cases[0].reason}"
        largest: dict[str, float] = {}
        for name, value in (figure for case in cases for figure in case.figures.items()):
            largest[name] = max(value, largest.get(name, value))
        figures = ", ".join(f"{name} {value:.2g}" for name, value in largest.items())
        lines.append(f"| `{file}` {test} | {share} | {sum(case.seconds for case in cases):.0f} | {figures} |")
    return "\n".join(lines)


def run(part: str, jobs: int, out: Path, arguments: list[str], spread: int = 1) -> tuple[int, list[Result]]:
    """Runs the tests of one part, `jobs` at a time on each of `spread` GPUs, or on all GPUs if that is 1.

    Returns pytest's exit code and what it found.
    """
    report = out / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "--durations=15", "-m", part]
    command += ["-n", str(jobs * spread), "--dist", "loadgroup", f"--junitxml={report}"]
    command += [str(Path(__file__).parent), *arguments]
    env = {"OMP_NUM_THREADS": "2", **os.environ} | ({SPREAD: str(spread)} if spread > 1 else {})
    code = subprocess.run(command, cwd=ROOT, env=env).returncode
    found = results_of(report) if report.exists() else []
    report.unlink(missing_ok=True)
    return (0 if code == NOTHING_SELECTED else code), found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder of the report")
    parser.add_argument("--jobs", type=int, default=10, help="tests at once per GPU; each takes up to 8 GB of it")
    parser.add_argument("pytest", nargs="*", help="after --: arguments of pytest")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    gpus = max(1, torch.cuda.device_count())
    began_s = time.monotonic()
    # Engines of two GPUs want them equally empty, so the tests of one GPU come after them.
    parts = [
        run("two_gpus", args.jobs, args.out, args.pytest),
        run("not two_gpus", args.jobs, args.out, args.pytest, spread=gpus),
    ]
    seconds = time.monotonic() - began_s
    results = sorted((r for _, found in parts for r in found), key=lambda result: (result.file, result.test))
    told = {
        "date": time.strftime("%Y-%m-%d"),
        "command": "make test-gpu",
        **machine(),
        "seconds": round(seconds),
        "tests": [asdict(result) for result in results],
    }
    (args.out / "gpu_tests.json").write_text(json.dumps(told, indent=1) + "\n")
    table = table_of(results)
    (args.out / "gpu_tests.md").write_text(table + "\n")
    print(f"\n{table}\n\n{seconds:.0f} s on {', '.join(told['gpus'])}; the report is in {args.out}")
    failed = [code for code, _ in parts if code]  # negative if a signal ended pytest
    return abs(failed[0]) if failed else int(not results)


if __name__ == "__main__":
    sys.exit(main())
