"""The run folder, which contains all files of one run.

    <run dir>/
      run.json        per launch: run id, time, command, working directory, host, versions, code, files (`start_record`)
      args.json       all resolved settings of the latest launch
      starts/N/       files of the N-th launch: args.json, and uncommitted code changes as CHECKOUT.diff
      metrics.jsonl   one line per logged step
      samples.jsonl   a few samples of each step and evaluation, as text
      dropped_rows.jsonl  the rows of datasets that were dropped, and why (if there are any)
      fleet.json fleet_orders.json  the engines of an active run, and those to drain (`slime.fleet.supervisor`)
      logs/           one file per process
      traces/         Chrome traces of the driver and the rollout side, for each launch
      prometheus/     targets to scrape, key and dashboard (--metrics-port)
      trackers/       files of --trackers
      tensorboard/
      profiles/       profiler traces of selected training steps and engines
      memory/         GPU memory histories
      non_finite/     samples with a non-finite loss
      report.html report.png report.md

Invariants
1. The folder is created atomically with its first files: it is written under a temporary name and then renamed.
2. Resuming keeps all files: metrics are appended, and `run.json` gets an entry for the new launch.
3. Settings that look like secrets are never written.
4. A new folder is only readable by its owner, because it contains prompts and responses. Resuming keeps the mode.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import socket
import sys
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from slime.core.cores import usable_cores
from slime.core.errors import ConfigError
from slime.core.files import replace_text
from slime.core.text import HIDDEN
from slime.observability.samples import DROPPED_ROWS, FILE_NAME
from slime.observability.start_record import (
    NOT_READ,
    SECRET,
    SLIME,
    checkouts,
    environment,
    hide_secrets,
    input_files,
)

logger = logging.getLogger(__name__)

PACKAGES = ("torch", "sglang", "sglang-router", "megatron-core", "ray", "transformers", "safetensors", "numpy")
"""Packages whose versions affect a run's results."""
SUBFOLDERS = ("logs", "traces")


@dataclass(frozen=True, slots=True)
class RunFolder:
    path: Path
    run_id: str

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def has_metrics(self) -> bool:
        return self.metrics.is_file() and self.metrics.stat().st_size > 0

    @property
    def samples(self) -> Path:
        return self.path / FILE_NAME

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def traces(self) -> Path:
        return self.path / "traces"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        run_id: str,
        args: Mapping[str, Any],
        command: Sequence[str] = (),
        without_effect: Mapping[str, str] = types.MappingProxyType({}),
    ) -> RunFolder:
        """Creates the folder, or reuses the folder of an earlier launch of the run.

        `args`: all resolved settings. `command`: the command with these settings, `slime train ...`. `without_effect`:
        setting without effect -> reason.
        Raises `ConfigError` if `path` contains something other than a run.
        """
        settings = plain(args)
        code = checkouts(SLIME, Path.cwd())
        ours = next((c for c in code if SLIME.is_relative_to(c.root)), None)
        start = {
            "run_id": run_id,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": hide_secrets(command or sys.argv),
            "cwd": str(Path.cwd()),
            "environment": environment(),
            "versions": versions(),
            "commit": ours and ours.commit + ("?" if ours.diff_sha256 == NOT_READ else "+" if ours.diff_sha256 else ""),
            "code": [{"root": c.root, "commit": c.commit, "diff_sha256": c.diff_sha256} for c in code],
            "files": input_files(settings),
            "host": host_facts(),
            "without_effect": plain(without_effect),
        }
        own = {"args.json": json_text(settings)} | {f"{Path(c.root).name}.diff": c.diff for c in code if c.diff}
        folder = cls(Path(path), run_id)
        if folder.path.exists() and any(folder.path.iterdir()):
            folder._join(start, own)
            if settings.get("load") is None or not folder.has_metrics:
                (folder.path / DROPPED_ROWS).unlink(missing_ok=True)  # from launches not continued here
        else:
            folder._make(start, own)
        return folder

    def note(self, name: str, facts: Any) -> None:
        """Adds an entry to the record of the latest launch."""
        record = self.path / "run.json"
        starts = json.loads(record.read_text())["starts"]
        starts[-1][name] = plain(facts)
        replace_text(record, json_text({"starts": starts}), durable=False)

    def write_report(self) -> None:
        """Writes a report of everything logged so far. Errors are logged, never raised."""
        if not self.has_metrics:
            logger.info("nothing was logged, so there is no report")
            return
        try:
            from slime.observability.report import summary_text, write_report

            report = write_report(self.path)
            logger.info("report: %s\n%s", report.page, summary_text(report.summary, report.title))
        except Exception:
            logger.exception("cannot write the report; the metrics are in %s", self.metrics)

    def _make(self, start: Mapping[str, Any], own: Mapping[str, str]) -> None:
        partial = self.path.with_name(f".{self.path.name}.{self.run_id}")
        try:
            partial.parent.mkdir(parents=True, exist_ok=True)
            partial.mkdir(mode=0o700)
            for name in SUBFOLDERS:
                (partial / name).mkdir()
            _write_start(partial, [start], own)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise ConfigError(f"--run-dir {self.path} cannot be created ({error}); choose another folder") from error
        try:
            partial.rename(self.path)  # also replaces an empty folder
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise ConfigError(
                f"another run has just created --run-dir {self.path} ({error}); choose another folder"
            ) from error

    def _join(self, start: Mapping[str, Any], own: Mapping[str, str]) -> None:
        record = self.path / "run.json"
        if not record.is_file():
            raise ConfigError(
                f"--run-dir {self.path} contains files but no run.json, so it is not a run folder; choose a new or "
                "empty folder"
            )
        for name in SUBFOLDERS:
            (self.path / name).mkdir(exist_ok=True)
        try:
            starts = json.loads(record.read_text())["starts"]
            earlier = [*starts] if isinstance(starts, list) else None
        except (ValueError, KeyError, TypeError):
            earlier = None
        if earlier is None:
            raise ConfigError(
                f"run.json in --run-dir {self.path} is corrupt, so its launches are unknown; choose another folder"
            )
        _write_start(self.path, [*earlier, start], own)


def _write_start(folder: Path, starts: Sequence[Mapping[str, Any]], own: Mapping[str, str]) -> None:
    """Writes the record of a launch. `own`: file name -> content, for the files of this launch."""
    where = folder / "starts" / str(len(starts) - 1)
    where.mkdir(parents=True, exist_ok=True)
    for name, text in own.items():
        replace_text(where / name, text, durable=False)
    replace_text(folder / "args.json", own["args.json"], durable=False)
    replace_text(folder / "run.json", json_text({"starts": list(starts)}), durable=False)


def json_text(value: Any) -> str:
    """Serialises JSON as in the run's files."""
    return json.dumps(value, indent=2, sort_keys=False) + "\n"


def plain(value: Any, name: str = "") -> Any:
    """Converts `value` to JSON types. Hides values whose names look like secrets. Converts unknown types to strings."""
    if isinstance(value, str) and value and SECRET.search(name.lower()):
        return HIDDEN
    if isinstance(value, Mapping):
        return {str(k): plain(v, str(k)) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v, name) for v in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """Returns the installed versions by package name (None: not installed), without importing the packages."""
    out: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            out[name] = None
    return out


def host_facts() -> dict[str, Any]:
    """Returns the machine details needed to interpret timings."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "name": socket.gethostname(),
        "system": platform.platform(),
        "num_cpus": os.cpu_count(),
        "num_usable_cpus": usable_cores(),
        "memory_bytes": memory_bytes,
        "num_gpus": len(list(Path("/dev").glob("nvidia[0-9]*"))),
    }
