"""Prepares the recipe: model, repositories, and an npm program. A second call prepares only what is missing.

python -m recipes.coding_agent.prepare --harness small_agent
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from slime.core.errors import ConfigError

from ..demo.model import unpack
from .generate import PROGRAMS, SMALL_AGENT
from .tasks import write_rows


def install(name: str, programs: Path) -> Path:
    """Installs an npm program in `programs`. Raises `ConfigError` if npm is missing or fails."""
    folder = programs / name
    if not (folder / "node_modules" / ".bin").is_dir():
        if shutil.which("npm") is None:
            raise ConfigError(f"harness {name} comes from npm, which is not installed; install Node.js")
        command = ["npm", "install", "--silent", "--prefix", str(folder), str(PROGRAMS[name].package)]
        if subprocess.run(command, check=False).returncode:
            shutil.rmtree(folder, ignore_errors=True)
            raise ConfigError(f"npm failed to install harness {name}; see its output above")
    return folder


def main(argv: list[str] | None = None) -> int:
    """Runs `python -m recipes.coding_agent.prepare`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("assets/coding_agent"), help="folder of train.jsonl")
    parser.add_argument("--model", type=Path, default=Path("assets/smollm2-135m-instruct"), help="folder of the model")
    parser.add_argument("--programs", type=Path, default=Path("assets/agents"), help="folder for npm programs")
    parser.add_argument("--harness", choices=(SMALL_AGENT, *PROGRAMS), default=SMALL_AGENT, help="the agent's program")
    options = parser.parse_args(argv)
    print(f"model: {unpack(options.model)}")
    if options.harness in PROGRAMS:
        print(f"program: {install(options.harness, options.programs)}")
    print(f"repositories: {write_rows(options.out / 'train.jsonl', options.harness)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
