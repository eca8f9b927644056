"""Plays `docker` for tests where no daemon runs: `docker_stand_in.py FOLDER run|exec|rm ...`.

It writes each command line to FOLDER/calls, and runs commands on this host in FOLDER/work, without any confinement.
What a container shows at /run/slime is put there by its volume, and what listens inside listens on the port in
FOLDER/port.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

WITHOUT_VALUE = ("--rm", "--interactive", "--init", "--read-only", "--force")


def parsed(words: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """(flags with their values, what stands behind them)."""
    flags, rest = [], list(words)
    while rest and rest[0].startswith("--"):
        flag = rest.pop(0)
        flags.append((flag, "" if flag in WITHOUT_VALUE else rest.pop(0)))
    return flags, rest


def main() -> int:
    """Plays one command line."""
    folder, verb, words = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    flags, rest = parsed(words)
    with (folder / "calls").open("a") as calls:
        calls.write(json.dumps([verb, flags, rest]) + "\n")
    if verb == "rm":
        if (folder / "forwarder").is_file():  # the end of a container ends all that runs in it
            os.kill(int((folder / "forwarder").read_text()), signal.SIGKILL)
        return 0
    if verb == "run":
        if rest[0] == "missing":
            print("Unable to find image 'missing' locally", file=sys.stderr)
            return 125
        return subprocess.run(["sh", *rest[1:]], cwd=folder / "work", check=False).returncode
    if rest[1] == "python3":
        shown = next(value for line in (folder / "calls").read_text().splitlines() for value in mounted(line))
        (folder / "forwarder").write_text(str(os.getpid()))
        program = [word.replace("/run/slime", shown) for word in rest[1:-1]]
        os.execvp("python3", [*program, (folder / "port").read_text()])
    os.chdir(folder / "work")
    code = subprocess.run(rest[1:], check=False).returncode
    return 128 - code if code < 0 else code


def mounted(line: str) -> list[str]:
    """Folders of this host that a recorded command line shows at /run/slime."""
    flags = json.loads(line)[1]
    return [value.split(":")[0] for flag, value in flags if flag == "--volume" and ":/run/slime" in value]


if __name__ == "__main__":
    sys.exit(main())
