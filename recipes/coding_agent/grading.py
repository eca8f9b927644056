"""Grades a repository that an agent changed, with hidden tests in a sandbox that the agent never saw.

Hidden tests have one of two forms:

- Calls and their expected values. The second sandbox gets the agent's files and the calls, but not the values, which
  are compared outside. So code cannot pass tests by searching for them, replacing them, printing values or ending its
  process.
- Files and a command. The files replace the agent's files of the same path, and exit status 0 counts as passed. The
  agent's code runs in the process that tests it, so code that ends this process with status 0 passes.

Invariants
1. No part of a task's hidden tests is written to a sandbox in which an agent ran.
2. What the hidden tests print is in the samples' metadata, for people. No model reads it.
3. From a sandbox in which an agent ran, only files are copied; their sizes and their number are limited.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from slime.agent.sandbox import ExecResult, Sandbox
from slime.rewards.graders.program_tests import same_value

MAX_FILES, MAX_FILE_BYTES = 200, 256 << 10
"""Limits of a repository; files beyond them are ignored."""
CALL_S = 10.0
"""Time limit of one hidden test."""
TESTS_S = 60.0
"""Time limit of a command that runs hidden tests, unless the row has one."""
SAID = 1500
"""Characters kept of the end of an output."""
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


async def files_of(sandbox: Sandbox, original: Mapping[str, object] = MappingProxyType({})) -> dict[str, bytes]:
    """Returns the agent's repository as path -> content, without links, hidden folders and compiled Python.

    If there are too many files, those of `original` come first, then new ones by name.
    """
    size = f"-size -{MAX_FILE_BYTES // 1024 + 1}k"
    leave = r"\( -name '.?*' -o -name __pycache__ \) -prune"
    listing = f"cd {sandbox.folder}/{REPOSITORY} && find . {leave} -o -type f {size} -print0"
    names = (await sandbox.exec(listing)).stdout.split("\0")
    found = {}
    found_names = [name.removeprefix("./") for name in names if name]
    for name in sorted(found_names, key=lambda name: (name not in original, name))[:MAX_FILES]:
        found[name] = (await sandbox.read_file(f"{sandbox.folder}/{REPOSITORY}/{name}"))[:MAX_FILE_BYTES]
    return found


async def run_tests(sandbox: Sandbox, files: Mapping[str, str | bytes], hidden: Mapping[str, Any]) -> ExecResult:
    """Lays hidden test files over a repository and runs their command. `sandbox` must be fresh."""
    tests: Mapping[str, str] = hidden["files"]
    in_the_way = lambda path: any(f"{path}/".startswith(f"{t}/") or t.startswith(f"{path}/") for t in tests)  # noqa: E731
    kept = {path: content for path, content in files.items() if not in_the_way(path)}
    folder = await lay_out(sandbox, {**kept, **tests})
    return await sandbox.exec(
        f"cd {folder}\n{hidden['command']}",
        env={"PYTHONDONTWRITEBYTECODE": "1"},
        timeout_s=float(hidden.get("timeout_s", TESTS_S)),
    )


async def passes(sandbox: Sandbox, function: str, arguments: list[Any], expected: Any) -> tuple[bool, dict[str, Any]]:
    """Returns whether a call returns the expected value, and how it ended."""
    call = json.dumps({"function": function, "arguments": arguments})
    environment = {"CALL": call, "PYTHONDONTWRITEBYTECODE": "1"}
    command = f'cd {sandbox.folder}/{REPOSITORY} && python3 ../ask.py "$CALL"'
    ended = await sandbox.exec(command, env=environment, timeout_s=CALL_S)
    lines = ended.stdout.splitlines()
    told = how(ended, f"{function}(*{arguments}) should return {expected!r}, but said:\n")
    try:
        returned = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return False, told
    return ended.code == 0 and bool(lines) and same_value(returned, expected), told


def how(ended: ExecResult, before: str = "") -> dict[str, Any]:
    """Returns how hidden tests ended, for `metadata["coding"]["graded"]`."""
    said = before + (ended.stdout + ended.stderr).strip()
    return {"code": ended.code, "timed_out": ended.timed_out, "said": said[-SAID:]}


async def grade(
    sandbox: Sandbox, files: Mapping[str, str | bytes], hidden: Mapping[str, Any]
) -> tuple[float, dict[str, Any]]:
    """Returns the reward, and the reason: how the command ended, or the first call that fails (empty if none does).

    The reward is the fraction of `fixes` that pass, or 0 if one of `keeps` fails; for a command, 1 if it succeeds, else
    0. `sandbox` must be fresh.
    """
    if "command" in hidden:
        ended = await run_tests(sandbox, files, hidden)
        return float(ended.code == 0 and not ended.timed_out), how(ended)
    await lay_out(sandbox, files)
    await sandbox.write_file(f"{sandbox.folder}/ask.py", ASK)
    function, fixes = str(hidden["function"]), hidden["fixes"]
    for arguments, expected in hidden["keeps"]:
        passed, told = await passes(sandbox, function, arguments, expected)
        if not passed:
            return 0.0, told
    results = [await passes(sandbox, function, arguments, expected) for arguments, expected in fixes]
    return sum(passed for passed, _ in results) / len(results), next((told for ok, told in results if not ok), {})
