"""Tasks from repositories of one's own: a folder, an issue and hidden tests become a row of the dataset.

    from slime.cli.recipes.coding_agent.repository import row, write

    write("tasks.jsonl", [row("shop", issue="...", hidden="shop_tests", command="python3 -m unittest -q")])

and then `DATA=tasks.jsonl slime recipe coding_agent`. The hidden tests are files, and a command whose exit status is 0
if they pass. `check` runs them before anything is trained: a test that passes already, or cannot run, rewards every
attempt in the same way, and nothing else would say so.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from slime.agent.sandbox import ExecResult
from slime.core.errors import ConfigError, Unconfined

from ..demo.task import write_jsonl
from . import grading
from .generate import places, sandbox_of

SHOWN = 300
"""Characters of a test's output in a message."""
NO_COMMAND = (126, 127)
"""Exit statuses of a shell that cannot run a command."""


def row(
    folder: str | Path,
    *,
    issue: str,
    hidden: str | Path,
    command: str,
    timeout_s: float = grading.TESTS_S,
    solution: str | Path | None = None,
    leave_out: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns one row of the dataset.

    `folder`: the repository that the agent gets. `issue`: what it is asked to do. `hidden`: a file or folder of tests,
    laid over the agent's result where the agent never was. `command`: runs them in the repository; status 0 is reward
    1, any other is 0, and so is no end within `timeout_s`. `solution`: a folder of files that mend the repository, with
    which `check` tries the tests; it is not part of the training data. `leave_out`: patterns such as "docs/*" of files
    that the agent does not need. Raises `ConfigError`.
    """
    where = Path(folder)
    if not issue.strip() or not command.strip():
        raise ConfigError(f"the row for {where} needs an issue and a command, but one of them is empty")
    tests = {"files": read_files(Path(hidden)), "command": command, "timeout_s": timeout_s}
    found: dict[str, Any] = {"files": read_files(where, leave_out), "hidden": tests}
    if solution is not None:
        found["solution"] = read_files(Path(solution))
    return {"prompt": [{"role": "user", "content": issue}], "label": where.resolve().name, "metadata": found}


def read_files(path: Path, leave_out: Sequence[str] = ()) -> dict[str, str]:
    """Returns the text files of a folder, or one file, as path -> text, without links, hidden and compiled files.

    Raises `ConfigError` where a file could not reach the tests: too many, too large, or not text.
    """
    if not path.exists():
        raise ConfigError(f"{path} does not exist; pass a folder of files")
    root = path.parent if path.is_file() else path
    names = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file() and not p.is_symlink())
    kept = {}
    for one in names:
        name = one.relative_to(root).as_posix()
        parts = name.split("/")
        if any(part.startswith(".") or part == "__pycache__" for part in parts):
            continue
        if any(fnmatch(name, pattern) for pattern in leave_out):
            continue
        kept[name] = one
    if not kept:
        raise ConfigError(f"{path} has no files; hidden files and what leave_out names do not count")
    if len(kept) > grading.MAX_FILES:
        raise ConfigError(
            f"{path} has {len(kept)} files, but the limit is {grading.MAX_FILES}, because each attempt copies all of "
            'them into two sandboxes; leave out what the task does not need: leave_out=["docs/*"]'
        )
    return {name: _text(one) for name, one in kept.items()}


def _text(path: Path) -> str:
    if (size := path.stat().st_size) > grading.MAX_FILE_BYTES:
        raise ConfigError(
            f"{path} has {size} bytes, but the limit is {grading.MAX_FILE_BYTES}; leave it out: "
            f'leave_out=["*{path.name}"]'
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f'{path} is not UTF-8 text; leave it out: leave_out=["*{path.name}"]') from None


def write(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Writes a dataset of JSON lines, atomically."""
    out = Path(path)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(out, (dict(one) for one in rows))
    return out


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads a dataset of this recipe. Raises `ConfigError` for a line that is not a task."""
    if not path.is_file():
        raise ConfigError(f"DATA is {path}, which is not a file; write one with {__name__}.write")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            one = json.loads(line)
            hidden = one["metadata"]["hidden"]
            complete = one["prompt"] and one["metadata"]["files"] and (hidden.get("command") or hidden["function"])
        except (ValueError, KeyError, TypeError, AttributeError):
            complete = False
        if not complete:
            raise ConfigError(
                f"line {number} of {path} is not a task: it needs prompt, metadata.files and metadata.hidden with a "
                "command and files, or with function, fixes and keeps"
            )
        rows.append(one)
    if not rows:
        raise ConfigError(f"{path} has no tasks")
    return rows


async def check(args: Any, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Runs the hidden tests of each row without an agent; returns what they said, a line for each row.

    They must fail on the files that the agent gets, and pass with the row's `solution` if it has one. Raises
    `ConfigError` for the first row for which they do not, and for a machine without sandboxes.
    """
    try:
        return await asyncio.gather(*(_check(args, one, number) for number, one in enumerate(rows, 1)))
    except Unconfined as refusal:
        raise ConfigError(f"the hidden tests need a sandbox: {refusal}") from refusal


async def _check(args: Any, one: Mapping[str, Any], number: int) -> str:
    data, name = one["metadata"], f"task {number} ({one.get('label') or 'without a label'})"
    hidden, files = data["hidden"], data["files"]
    async with places(args), sandbox_of(args) as sandbox:
        if "command" not in hidden:
            if reward := (await grading.grade(sandbox, files, hidden))[0]:
                raise ConfigError(_passes(name, f"{reward:.0%} of its hidden tests pass"))
            return f"{name}: the hidden tests fail, as they should before the repair"
        before = await grading.run_tests(sandbox, files, hidden)
    command, solution = hidden["command"], data.get("solution")
    if before.code in NO_COMMAND and not before.timed_out:
        raise ConfigError(
            f"{name}: the sandbox cannot run {command!r}, so each attempt would get reward 0: {_end(before)}"
        )
    if before.code == 0 and not before.timed_out:
        raise ConfigError(_passes(name, "its hidden tests pass"))
    if solution is None:
        if before.timed_out:
            raise ConfigError(
                f"{name}: {command!r} did not end within {hidden['timeout_s']:g} s on the unchanged repository; raise "
                "timeout_s, or, if the bug itself keeps it from ending, pass a solution, with which it must end"
            )
        return f"{name}: the hidden tests fail, as they should before the repair; is this why? {_end(before)}"
    async with places(args), sandbox_of(args) as sandbox:
        after = await grading.run_tests(sandbox, {**files, **solution}, hidden)
    if after.timed_out:
        raise ConfigError(f"{name}: {command!r} did not end within {hidden['timeout_s']:g} s with the solution")
    if after.code:
        raise ConfigError(f"{name}: the hidden tests fail with the solution, too, status {after.code}: {_end(after)}")
    return f"{name}: the hidden tests fail before the repair and pass with the solution"


def _passes(name: str, what: str) -> str:
    return (
        f"{name}: {what} before anything is repaired, so an agent that does nothing would be rewarded; "
        "let the tests cover the bug, or put the bug into the repository"
    )


def _end(ended: ExecResult) -> str:
    said = (ended.stdout + ended.stderr).strip()
    return " ".join(said[-SHOWN:].split()) or f"no output, status {ended.code}"
