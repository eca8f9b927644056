"""The run folder: everything that one run leaves behind, in one place.

    <run dir>/
      run.json        run id, each start (time, command, host, versions of the engines, commit, settings without effect)
      args.json       every resolved setting of the latest start
      metrics.jsonl   one line per logged step
      logs/           one file per process
      traces/         one Chrome trace per process
      tensorboard/
      non_finite/       samples whose loss was not finite
      report.png report.md

Invariants
1. The folder appears at once with its first files in it, or not at all (written beside it, then renamed).
2. A resume keeps what is there: metrics are appended, `run.json` gets one more start.
3. Settings that look like a secret are never written.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from slime.core.errors import ConfigError

logger = logging.getLogger(__name__)

PACKAGES = ("torch", "sglang", "sglang-router", "megatron-core", "ray", "transformers", "safetensors", "numpy")
"""Distributions whose versions decide what a run computes."""
SECRET = re.compile(r"(^|_)((?<!input_)(?<!label_)(?<!tool_)(?<!metadata_)(?<!reward_)keys?|token|secret|password)$")
SUBFOLDERS = ("logs", "traces")
HIDDEN = "<hidden>"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run."""

    path: Path
    run_id: str

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def traces(self) -> Path:
        return self.path / "traces"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def report_png(self) -> Path:
        return self.path / "report.png"

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        run_id: str,
        args: Mapping[str, Any],
        without_effect: Mapping[str, str] = types.MappingProxyType({}),
    ) -> RunFolder:
        """Makes the folder, or joins the one that an earlier start of the run made.

        `args`: every resolved setting; `without_effect`: those that were given and act on nothing, and why.
        Raises `ConfigError` if `path` holds something that is not a run.
        """
        start = {
            "run_id": run_id,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": hide_secrets(sys.argv),
            "versions": versions(),
            "commit": git_commit(Path(__file__).parent),
            "host": host_facts(),
            "without_effect": plain(without_effect),
        }
        folder = cls(Path(path), run_id)
        if folder.path.exists() and any(folder.path.iterdir()):
            folder._join(start, args)
        else:
            folder._make(start, args)
        return folder

    def write_report(self) -> None:
        """Makes report.png and report.md from what was logged so far; a failure is logged, never raised."""
        from slime.observability.report import summary_text, write_report

        if not self.metrics.is_file() or not self.metrics.stat().st_size:
            logger.info("nothing was logged, so there is no report")
            return
        try:
            title = report_title(json.loads((self.path / "args.json").read_text()))
            summary = write_report(self.metrics, self.report_png, title=title)
            logger.info("report: %s\n%s", self.report_png, summary_text(summary, title))
        except Exception:
            logger.exception("no report could be made; the metrics are in %s", self.metrics)

    def _make(self, start: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        partial = self.path.with_name(f".{self.path.name}.{self.run_id}")
        for name in SUBFOLDERS:
            (partial / name).mkdir(parents=True)
        _write_json(partial / "run.json", {"starts": [start]})
        _write_json(partial / "args.json", plain(settings))
        try:
            partial.rename(self.path)  # also replaces an empty folder
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise ConfigError(f"got --run-dir {self.path}, because another run just made it: {error}") from error

    def _join(self, start: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        record = self.path / "run.json"
        if not record.is_file():
            raise ConfigError(
                f"got --run-dir {self.path}, because it holds files and no run.json, so it is not the folder of a run; "
                "do: name a new or an empty folder"
            )
        for name in SUBFOLDERS:
            (self.path / name).mkdir(exist_ok=True)
        starts = json.loads(record.read_text())["starts"]
        _write_json(record, {"starts": [*starts, start]})
        _write_json(self.path / "args.json", plain(settings))


def _write_json(path: Path, value: Any) -> None:
    """Writes through a temporary file, so that a reader never sees half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=2, sort_keys=False) + "\n")
    partial.replace(path)


def plain(value: Any, name: str = "") -> Any:
    """`value` as JSON; secrets hidden by the name of their setting, unknown objects by their text."""
    if isinstance(value, str) and value and SECRET.search(name):
        return HIDDEN
    if isinstance(value, Mapping):
        return {str(k): plain(v, str(k)) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v, name) for v in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def report_title(args: Mapping[str, Any]) -> str:
    """Model, data and method in a few words."""
    data = str(args.get("prompt_data") or "").partition("@")[0]
    method = "SFT" if args.get("loss_type") == "sft_loss" else str(args.get("advantage_estimator") or "").upper()
    parts = [Path(str(args.get("hf_checkpoint") or "")).name, Path(data).stem, method]
    return ", ".join(p for p in parts if p) or "slime run"


def hide_secrets(command: Sequence[str]) -> list[str]:
    """A command line without the values of secret flags, in both spellings (`--wandb-key x`, `--wandb-key=x`)."""
    out: list[str] = []
    hide = False  # up to the next flag: it may take several
    for word in command:
        flag, equals, _ = word.partition("=")
        secret = flag.startswith("--") and SECRET.search(flag.lstrip("-").replace("-", "_")) is not None
        is_flag = word.startswith("--")
        out.append(HIDDEN if hide and not is_flag else f"{flag}={HIDDEN}" if secret and equals else word)
        hide = secret and not equals if is_flag else hide
    return out


def versions() -> dict[str, str | None]:
    """Installed versions by distribution name, None where absent. Imports none of them."""
    out: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            out[name] = None
    return out


def git_commit(where: Path) -> str | None:
    """The commit of the checkout that holds `where`, with `+` if files differ from it; None outside a checkout."""
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"],
            cwd=where,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip() or None


def host_facts() -> dict[str, Any]:
    """What the machine is: enough to read a timing by."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "name": socket.gethostname(),
        "system": platform.platform(),
        "num_cpus": os.cpu_count(),
        "num_usable_cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes,
        "num_gpus": len(list(Path("/dev").glob("nvidia[0-9]*"))),
    }
