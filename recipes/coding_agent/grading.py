"""Grades a repository that an agent changed, with hidden tests in a sandbox that the agent never saw.

A hidden test is a call and its expected value. The second sandbox gets the agent's files and the calls, but not the
values, which are compared outside. So code cannot pass tests by searching for them, replacing them, printing values or
ending its process.

Invariants
1. No part of a task's hidden tests is written to a sandbox in which an agent ran.
2. From a sandbox in which an agent ran, only files are copied; their sizes and their number are limited.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from slime.agent.sandbox import Sandbox
from slime.rewards.graders.program_tests import same_value

MAX_FILES, MAX_FILE_BYTES = 200, 256 << 10
"""Limits of a repository; files beyond them are ignored."""
CALL_S = 10.0
"""Time limit of one hidden test."""
REPOSITORY = "repository"
"""Name of the repository's folder inside the sandbox's folder."""
ASK = """\
import importlib, json, sys
sys.path.insert(0, ".")
call = json.loads(sys.argv[1])
module, _, name = call["function"].rpartition(".")
value = getattr(importlib.import_module(module), name)(*call["arguments"])
print("\\n" + json.dumps(value))
"""


async def lay_out(sandbox: Sandbox, files: Mapping[str, str | bytes]) -> str:
    """Writes a repository; returns its folder."""
    folder = f"{sandbox.folder}/{REPOSITORY}"
    for path, content in files.items():
        await sandbox.write_file(f"{folder}/{path}", content)
    return folder


async def files_of(sandbox: Sandbox) -> dict[str, bytes]:
    """Returns the agent's repository as path -> content, without links, hidden folders and compiled Python."""
    size = f"-size -{MAX_FILE_BYTES // 1024 + 1}k"
    leave = r"\( -name '.?*' -o -name __pycache__ \) -prune"
    listing = f"cd {sandbox.folder}/{REPOSITORY} && find . {leave} -o -type f {size} -print0"
    names = (await sandbox.exec(listing)).stdout.split("\0")
    found = {}
    for name in sorted(name.removeprefix("./") for name in names if name)[:MAX_FILES]:
        found[name] = (await sandbox.read_file(f"{sandbox.folder}/{REPOSITORY}/{name}"))[:MAX_FILE_BYTES]
    return found


async def passes(sandbox: Sandbox, function: str, arguments: list[Any], expected: Any) -> bool:
    """Returns whether a call returns the expected value."""
    call = json.dumps({"function": function, "arguments": arguments})
    environment = {"CALL": call, "PYTHONDONTWRITEBYTECODE": "1"}
    command = f'cd {sandbox.folder}/{REPOSITORY} && python3 ../ask.py "$CALL"'
    ended = await sandbox.exec(command, env=environment, timeout_s=CALL_S)
    lines = ended.stdout.splitlines()
    try:
        returned = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return False
    return ended.code == 0 and bool(lines) and same_value(returned, expected)


async def grade(sandbox: Sandbox, files: Mapping[str, bytes], hidden: Mapping[str, Any]) -> float:
    """Returns the fraction of `fixes` that pass, or 0 if one of `keeps` fails. `sandbox` must be fresh."""
    await lay_out(sandbox, files)
    await sandbox.write_file(f"{sandbox.folder}/ask.py", ASK)
    function, fixes = str(hidden["function"]), hidden["fixes"]
    for arguments, expected in hidden["keeps"]:
        if not await passes(sandbox, function, arguments, expected):
            return 0.0
    results = [await passes(sandbox, function, arguments, expected) for arguments, expected in fixes]
    return sum(results) / len(results)
