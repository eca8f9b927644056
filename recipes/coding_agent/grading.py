"""What an agent made of a repository, and what it is worth: hidden tests in a sandbox that the agent never saw.

A hidden test is a call and the value that is to come back. The second sandbox gets the agent's files and the calls,
not the values: they are compared out here. So code that looks for the tests, replaces them, prints what it likes or
ends its process has nothing to win.

Invariants
1. Nothing of a task's hidden tests is written to a sandbox in which an agent ran.
2. Of a sandbox in which an agent ran, files are taken over and nothing else; each is bounded, and so is their number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from slime.agent.sandbox import Sandbox
from slime.rewards.graders.program_tests import same_value

MAX_FILES, MAX_FILE_BYTES = 200, 256 << 10
"""Of a repository; what is more is left behind."""
CALL_S = 10.0
"""Of one hidden test."""
REPOSITORY = "repository"
"""Folder below the sandbox's own."""
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
    """The repository as the agent left it: path -> content. Links, hidden folders and what Python compiled stay."""
    size = f"-size -{MAX_FILE_BYTES // 1024 + 1}k"
    leave = r"\( -name '.?*' -o -name __pycache__ \) -prune"
    listing = f"cd {sandbox.folder}/{REPOSITORY} && find . {leave} -o -type f {size} -print0"
    names = (await sandbox.exec(listing)).stdout.split("\0")
    found = {}
    for name in sorted(name.removeprefix("./") for name in names if name)[:MAX_FILES]:
        found[name] = (await sandbox.read_file(f"{sandbox.folder}/{REPOSITORY}/{name}"))[:MAX_FILE_BYTES]
    return found


async def passes(sandbox: Sandbox, function: str, arguments: list[Any], expected: Any) -> bool:
    """Whether one call returns its value."""
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
    """The share of `fixes` that pass, from 0 to 1; 0 if one of `keeps` fails. `sandbox`: a fresh one."""
    await lay_out(sandbox, files)
    await sandbox.write_file(f"{sandbox.folder}/ask.py", ASK)
    function, fixes = str(hidden["function"]), hidden["fixes"]
    for arguments, expected in hidden["keeps"]:
        if not await passes(sandbox, function, arguments, expected):
            return 0.0
    results = [await passes(sandbox, function, arguments, expected) for arguments, expected in fixes]
    return sum(results) / len(results)
