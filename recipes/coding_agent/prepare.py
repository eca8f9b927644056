"""Prepares the recipe: model, repositories, and an npm program. A second call prepares only what is missing.

python -m recipes.coding_agent.prepare --harness small_agent

With `--data`, the tasks are those of the file, whose hidden tests are tried first (`repository.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.core.errors import ConfigError, SlimeError
from slime.core.user_files import read_yaml

from ..demo.model import unpack
from .generate import PROGRAMS, SMALL_AGENT
from .repository import check, read_rows, write
from .tasks import write_rows

FIRST_REQUEST_TOKENS = {"claude_code": 21_200}
"""Tokens of a program's first request with all its tools, in the version that is installed, by SmolLM2's tokenizer."""


def require_room(harness: str, custom: Mapping[str, Any]) -> None:
    """Raises `ConfigError` if a program's first request, with all its tools, is longer than a conversation may be."""
    need, most = FIRST_REQUEST_TOKENS.get(harness, 0), int(custom.get("coding_max_context_tokens", 0))
    if need > most and not custom.get("coding_program_flags"):
        raise ConfigError(
            f"the first request of {harness} has about {need} tokens, but coding_max_context_tokens is {most}, so it "
            "would get no answer; in a copy of settings.yaml, whose path is CONFIG, raise the limit, or leave out "
            "tools with coding_program_flags: [--bare, --tools, Bash]"
        )


def install(name: str, programs: Path) -> Path:
    """Installs an npm program in `programs`. Raises `ConfigError` if npm is missing or fails."""
    folder = programs / name
    if not (folder / "node_modules" / ".bin").is_dir():
        if shutil.which("npm") is None:
            raise ConfigError(f"harness {name} comes from npm, which is not installed; install Node.js")
        quiet = ("--loglevel", "error", "--no-audit", "--no-fund")
        command = ["npm", "install", *quiet, "--prefix", str(folder), str(PROGRAMS[name].package)]
        if subprocess.run(command, check=False).returncode:
            shutil.rmtree(folder, ignore_errors=True)
            raise ConfigError(f"npm failed to install harness {name}; see its output above")
    return folder


def main(argv: list[str] | None = None) -> int:
    """Runs `python -m recipes.coding_agent.prepare`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("assets/coding_agent/train.jsonl"), help="the dataset")
    parser.add_argument("--model", type=Path, default=Path("assets/smollm2-135m-instruct"), help="folder of the model")
    parser.add_argument("--programs", type=Path, default=Path("assets/agents"), help="folder for npm programs")
    parser.add_argument("--data", type=Path, help="tasks of your own; without it, the recipe's")
    settings = Path(__file__).with_name("settings.yaml")
    parser.add_argument("--config", type=Path, default=settings, help="settings.yaml or a copy of it")
    parser.add_argument("--harness", choices=(SMALL_AGENT, *PROGRAMS), default=SMALL_AGENT, help="the agent's program")
    options = parser.parse_args(argv)
    try:
        prepare(options)
    except SlimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def prepare(options: argparse.Namespace) -> None:
    """Prepares what is missing. Raises `SlimeError`."""
    custom = read_yaml(str(options.config), "CONFIG").get("custom", {})
    require_room(options.harness, custom)
    rows = None if options.data is None else read_rows(options.data)
    if rows is not None:
        for line in asyncio.run(check(argparse.Namespace(**custom), rows)):
            print(line)
    if options.harness in PROGRAMS:
        print(f"program: {install(options.harness, Path(custom.get('coding_programs', options.programs)))}")
    print(f"model: {unpack(options.model)}")
    written = (
        write_rows(options.out, options.harness) if rows is None else write_own(options.out, options.harness, rows)
    )
    print(f"repositories: {written}")


def write_own(out: Path, harness: str, rows: list[dict[str, Any]]) -> Path:
    """Writes the dataset of own tasks, without their solutions, for one agent program."""
    for row in rows:
        row["metadata"].pop("solution", None)
        row["metadata"]["harness"] = harness
    return write(out, rows)


if __name__ == "__main__":
    sys.exit(main())
