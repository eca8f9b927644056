"""`slime upgrade-check`: tests newer engine versions next to the installed ones, and reports what breaks.

    slime upgrade-check sglang==0.5.24
    slime upgrade-check sglang==0.5.24 transformers==5.20.0 --names-only
    slime upgrade-check megatron-core==0.20.0 --output upgrade.md
    slime upgrade-check --jobs 8

It creates a virtual environment in which the candidates shadow the installed packages, so nothing installed changes.
Without candidates, it checks the installed versions. First it checks every name, hook, route and field that slime
touches (`slime.compat.touched`, a minute). Then, in a checkout of the repository, it runs the contract tests of
`CHECKS` with the candidates: every family and every weight transport. The exit code is 1 if one fails. Ctrl-C and
SIGTERM end all processes that it started, and remove its temporary folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from slime.core.engine_interface import parsed
from slime.core.errors import ConfigError

ROOT = Path(__file__).parents[2]
"""The repository, if slime is installed from a checkout."""
WEIGHTS, ROLLOUT, TRAINING = (f"tests/contract/{room}" for room in ("weights", "rollout", "training"))
CHECKS: Mapping[str, tuple[str, ...]] = {
    "load, sync, log-probs of each family": (
        f"{WEIGHTS}/test_families_on_engines.py::test_trainer_and_engine_agree_after_a_sync",
    ),
    "tensor, distributed, disk": (f"{WEIGHTS}/test_sync_to_engine.py::test_new_weights_arrive_and_are_served",),
    "delta": (f"{WEIGHTS}/test_delta_to_engine.py::test_deltas_arrive_and_are_served",),
    "digests": (f"{WEIGHTS}/test_faults_on_the_way.py::test_each_fault_is_caught",),
    "layouts (TP, PP, EP, DP)": (
        f"{WEIGHTS}/test_sync_to_engine.py::test_two_ranks",
        f"{WEIGHTS}/test_sync_to_engine.py::test_two_pipeline_stages",
        f"{WEIGHTS}/test_sync_to_engine.py::test_groups_of_ranks",
    ),
    "quantised": (f"{WEIGHTS}/test_quantised_in_sglang.py",),
    "pause modes": (f"{ROLLOUT}/test_pause_modes.py",),
    "abort": (f"{ROLLOUT}/test_aborts_on_engine.py", f"{ROLLOUT}/test_taken_back.py"),
    "routed experts": (f"{TRAINING}/test_routing_replay.py",),
    "vision": (f"{WEIGHTS}/test_vision_on_engine.py",),
    "training of each family": (f"{TRAINING}/test_families.py",),
    "golden steps": (f"{TRAINING}/test_steps_against_torch.py", f"{TRAINING}/test_partition_invariance.py"),
    "resume": (f"{TRAINING}/test_torch_dist.py", f"{TRAINING}/test_resume_two_ranks.py"),
    "LoRA": (f"{TRAINING}/test_lora.py",),
    "draft (MTP)": (f"{TRAINING}/test_mtp.py",),
}
"""Row of the table -> contract tests."""
NAMES_LIMIT_S = 600.0
GRACE_S = 10.0
"""Time between interrupting a child process and killing it."""
NOT_PINNED = ("torch", "torchvision", "torchaudio")
"""Packages that are never replaced, even if SGLang pins them, because their builds are specific to the machine."""
OK, BAD, UNKNOWN = "✓", "✗", "?"


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    num_passed: int
    num_failed: int
    first_error: str = ""

    @property
    def sign(self) -> str:
        return BAD if self.num_failed else OK if self.num_passed else UNKNOWN


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "candidates",
        nargs="*",
        metavar="PACKAGE==VERSION",
        help="packages or wheel files to test (default: the installed versions)",
    )
    parser.add_argument(
        "--names-only", action="store_true", help="check only names, hooks, routes and settings, which takes a minute"
    )
    parser.add_argument("--only", metavar="ROW", action="append", help="run only this row of the table (repeatable)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="rows to run in parallel (default: 1)")
    parser.add_argument("--venv", type=Path, metavar="DIR", help="create the virtual environment here, and reuse it")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the table to this Markdown file")


def run(options: argparse.Namespace) -> int:
    """Returns 0 if everything passes, else 1. Raises `ConfigError` if a candidate cannot be installed."""
    rows = _chosen(options.only or ())
    _require_usable(options)
    if options.jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, not {options.jobs}")
    with tempfile.TemporaryDirectory(prefix="slime-upgrade-") as scratch, Children() as children:
        venv = Venv(options.venv or Path(scratch, "venv"), children)
        tried = venv.install(options.candidates)
        touched = venv.touched(Path(scratch, "touched.json"))
        text = "\n".join(named(tried or ["the installed versions"], touched))
        print(text, flush=True)
        failed = any(finding["problem"] for finding in touched["findings"])
        if not options.names_only:
            table = venv.checked(rows, Path(scratch), options.jobs)
            text += "\n\n" + "\n".join(as_table(table))
            failed |= any(row.sign == BAD for row in table)
    if options.output:
        options.output.write_text(text + "\n")
    print(f"\n{'some checks failed' if failed else 'all checks passed'}")
    return int(failed)


def _require_usable(options: argparse.Namespace) -> None:
    """Raises `ConfigError` for options that would otherwise fail only after the checks, or name nothing to install."""
    if options.output and not options.output.parent.is_dir():
        raise ConfigError(f"--output {options.output}: {options.output.parent} is not a folder")
    if options.only and options.names_only:
        raise ConfigError("--only selects rows of tests, but --names-only runs none; drop one of them")
    folder = options.venv
    if folder and folder.exists() and not (folder / "pyvenv.cfg").is_file() and any(folder.iterdir()):
        raise ConfigError(f"--venv {folder} is not a virtual environment and not empty; choose another folder")
    for candidate in options.candidates:
        if "==" not in candidate and not Path(candidate).is_file():
            raise ConfigError(f"{candidate} is neither PACKAGE==VERSION nor a wheel file")


def _chosen(only: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    if unknown := sorted(set(only) - CHECKS.keys()):
        raise ConfigError(f"--only {unknown[0]!r} is not a row; the rows are: {'; '.join(CHECKS)}")
    return {name: tests for name, tests in CHECKS.items() if not only or name in only}


class Children:
    """Child processes, each in its own process group. Leaving the `with` block ends those that are still running."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._over = False

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def run(
        self, command: Sequence[str], limit_s: float | None = None, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command; ends it if an error is raised. `more` are arguments of `Popen`. Any thread can call it.

        Raises `subprocess.TimeoutExpired`, and `ConfigError` after `end`.
        """
        with self._lock:
            if self._over:
                raise ConfigError(f"{command[0]} was not started, because the check is stopping; run the command again")
            child = subprocess.Popen(command, start_new_session=True, text=True, **more)
            self._running.add(child)
        try:
            output, errors = child.communicate(timeout=limit_s)
        finally:
            with self._lock:
                self._running.discard(child)
            _end(child)
        return subprocess.CompletedProcess(command, child.returncode, output, errors)

    def end(self) -> None:
        """Ends all running processes and prevents threads from starting more."""
        with self._lock:
            self._over, running = True, list(self._running)
        for child in running:
            _end(child)


def _end(child: subprocess.Popen[str]) -> None:
    """Interrupts a process group, so that pip and pytest clean up, and kills it after `GRACE_S`."""
    if child.poll() is not None:
        return
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)


class Venv:
    """A virtual environment in which candidates shadow the installed packages."""

    def __init__(self, folder: Path, children: Children) -> None:
        self.folder, self.python, self._children = folder, folder / "bin" / "python", children
        self._site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))

    def install(self, candidates: Sequence[str]) -> list[str]:
        """Installs the candidates without dependencies, then the versions that they pin for installed packages.

        Returns the name and version of each package that shadows an installed one.
        """
        if not self.python.is_file():
            self._do(sys.executable, "-m", "venv", "--without-pip", str(self.folder))
            self._site.joinpath("installed.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
        if not candidates:
            return []
        print(f"installing {', '.join(candidates)} into {self.folder}", flush=True)
        self._pip(candidates)
        if pins := list(self.pins()):
            print(f"with pinned dependencies: {', '.join(pins)}", flush=True)
            self._pip(pins)
        return sorted(f"{found.name} {found.version}" for found in metadata.distributions(path=[str(self._site)]))

    def pins(self) -> Iterator[str]:
        """Yields the requirement for each installed package whose version does not satisfy a candidate."""
        for candidate in metadata.distributions(path=[str(self._site)]):
            for line in candidate.requires or ():
                try:
                    wanted = Requirement(line)
                except InvalidRequirement:
                    continue
                if wanted.name in NOT_PINNED or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
                    continue
                try:
                    have = parsed(metadata.version(wanted.name))
                except metadata.PackageNotFoundError:
                    continue
                if have is not None and not wanted.specifier.contains(have, prereleases=True):
                    yield f"{wanted.name}{wanted.specifier}"

    def touched(self, output: Path) -> dict[str, Any]:
        """Returns what `slime.compat.touched` found with the candidates."""
        self._do(str(self.python), "-m", "slime.compat.touched", "--output", str(output), quiet=True)
        found: dict[str, Any] = json.loads(output.read_text())
        return found

    def checked(self, rows: Mapping[str, tuple[str, ...]], scratch: Path, jobs: int = 1) -> list[Row]:
        """Runs the contract tests of each row with the candidates. Prints each result as soon as it is available."""
        if not (ROOT / "tests" / "contract").is_dir():
            raise ConfigError(f"{ROOT} has no tests; run this in a checkout of the repository, or pass --names-only")

        def check(number: int, name: str) -> Row:
            report, log = scratch / f"{number}.xml", scratch / f"{number}.log"
            command = [str(self.python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
            with log.open("w") as output:
                self._children.run(
                    [*command, *rows[name]], cwd=ROOT, env=self._environment(), stdout=output, stderr=output
                )
            row = read_report(name, report, log)
            print(as_line(row), flush=True)
            return row

        with ThreadPoolExecutor(jobs) as pool:
            try:
                return list(pool.map(check, range(len(rows)), rows))
            except BaseException:
                self._children.end()  # otherwise the pool would wait for its threads, which wait for their processes
                raise

    def _pip(self, what: Iterable[str]) -> None:
        """Installs packages even if the same version is already there or among the installed packages."""
        pip = (sys.executable, "-m", "pip", "--python", str(self.python), "install", "-q", "--no-deps")
        self._do(*pip, "--force-reinstall", *what)

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}

    def _do(self, *command: str, quiet: bool = False) -> None:
        try:
            done = self._children.run(
                command, NAMES_LIMIT_S, env=self._environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"{' '.join(command)} took more than {NAMES_LIMIT_S:.0f} s; check the network and the disk"
            ) from error
        if done.returncode:
            raise ConfigError(f"{' '.join(command)} failed:\n{(done.stderr or done.stdout)[-2000:]}")


def named(candidates: Sequence[str], touched: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines about names, hooks, routes and settings."""
    findings = touched["findings"]
    yield f"# {', '.join(candidates)}\n"
    yield "| touched | tried | broken | first problem |\n|---|---|---|---|"
    for kind in dict.fromkeys(finding["kind"] for finding in findings):
        own = [finding for finding in findings if finding["kind"] == kind]
        bad = [finding for finding in own if finding["problem"]]
        first = f"{bad[0]['what']}: {bad[0]['problem']}" if bad else ""
        yield f"| {kind}s {BAD if bad else OK} | {len(own)} | {len(bad)} | {first} |"
    for finding in findings:
        if finding["problem"]:
            yield f"- {BAD} {finding['kind']} `{finding['what']}`: {finding['problem']}"
    for what in ("hooks that can go", "patches that can go"):
        if touched[what]:
            yield f"- {what} ({len(touched[what])}):"
            yield from (f"  - {one}" for one in touched[what])
    for owner, changed in touched["settings"].items():
        for verb in ("came", "went"):
            if changed[verb]:
                yield f"- settings of {owner} that {verb} ({len(changed[verb])}): {', '.join(changed[verb])}"


def read_report(name: str, report: Path, log: Path) -> Row:
    """Returns a row of the table from pytest's JUnit report."""
    if not report.is_file():
        return Row(name, 0, 1, (log.read_text().strip().splitlines() or ["pytest wrote no report"])[-1])
    passed, errors = 0, []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        bad = next((child for child in case if child.tag in ("failure", "error")), None)
        if bad is not None:
            errors.append(f"{case.get('name')}: {(bad.get('message') or '').strip()}"[:300])
        elif case.find("skipped") is None:
            passed += 1
    return Row(name, passed, len(errors), errors[0] if errors else "")


def as_line(row: Row) -> str:
    first = " ".join(row.first_error.split())
    return f"{row.sign} {row.name}: {row.num_passed} passed, {row.num_failed} failed {first}".rstrip()


def as_table(rows: Sequence[Row]) -> Iterator[str]:
    yield "| behaviour | | passed | failed | first error |\n|---|---|---|---|---|"
    for row in rows:
        first = " ".join(row.first_error.split()).replace("|", "\\|")
        yield f"| {row.name} | {row.sign} | {row.num_passed} | {row.num_failed} | {first} |"
