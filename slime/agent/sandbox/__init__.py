"""Sandboxes for running an agent's commands. One file per kind; `LocalSandbox` needs only this machine.

    async with LocalSandbox(reach=("127.0.0.1", adapter_port)) as sandbox:
        await sandbox.write_file("main.py", "print(1)")
        ended = await sandbox.exec("python3 main.py", timeout_s=10)

Invariants
1. No process of the sandbox outlives its `async with` block.
2. Within the block, commands share files, and can see processes that earlier commands left running.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from slime.core.registry import Registry
from slime.rollout.guard import waiting
from slime.rollout.traces import traced

if TYPE_CHECKING:
    from slime.agent.sandbox.e2b import E2BSandbox

__all__ = ["SANDBOXES", "Command", "CommandFailed", "E2BSandbox", "ExecResult", "Sandbox", "exec_and_wait"]


@dataclass(frozen=True, slots=True)
class ExecResult:
    code: int
    """Exit status; 128 + N if signal N killed the command."""
    stdout: str
    stderr: str
    timed_out: bool = False

    def __iter__(self) -> Iterator[Any]:
        """Unpacks to (code, stdout, stderr), as in the public slime."""
        return iter((self.code, self.stdout, self.stderr))


@dataclass(frozen=True, slots=True)
class Command:
    line: str
    """A shell command line."""
    user: str | None
    """None: the sandbox's default user."""
    env: Mapping[str, str]
    timeout_s: float
    idempotent: bool
    """Whether a remote sandbox may send the command twice."""

    @property
    def bounded(self) -> str:
        """The command line wrapped in `timeout`, which the image must provide; exit status 137 at the limit."""
        return f"exec timeout -s KILL {math.ceil(self.timeout_s)} sh -c {shlex.quote(self.line)} </dev/null"


class CommandFailed(RuntimeError):
    """A command that was run with `check` failed or exceeded its time limit."""


class Sandbox(ABC):
    """An isolated environment for running commands, for use with `async with`."""

    name: ClassVar[str]
    folder: str = "/work"
    """The working directory of commands, and the base of relative file paths."""
    sandbox_id: str
    """The sandbox's name in logs, set once it has started."""

    @abstractmethod
    async def __aenter__(self) -> Self:
        """Starts the sandbox. Raises `Unconfined` or `ConfigError`, which say what is missing."""

    @abstractmethod
    async def __aexit__(self, *error: object) -> None:
        """Ends the sandbox and all of its processes."""

    async def exec(
        self,
        command: str = "",
        *,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        check: bool = False,
        idempotent: bool = False,
        cmd: str = "",
        timeout: float | None = None,
    ) -> ExecResult:
        """Runs a shell command line in `folder`. `check`: raise `CommandFailed` unless the status is 0. `idempotent`: a
        remote sandbox may resend the command if the response is lost. `cmd`, `timeout`: the public slime's names for
        `command` and `timeout_s`.
        """
        command, timeout_s = command or cmd, timeout_s if timeout is None else timeout
        with waiting(), traced("tool: command", sandbox=self.sandbox_id):
            result = await self._exec(Command(command, user, env or {}, timeout_s, idempotent))
        if check and (result.code != 0 or result.timed_out):
            why = "exceeded its time limit" if result.timed_out else f"exited with status {result.code}"
            raise CommandFailed(f"{command[:200]!r} {why}: {result.stderr[-500:]}")
        return result

    @abstractmethod
    async def _exec(self, command: Command) -> ExecResult:
        """Runs a command and returns its result, even if it fails."""

    @abstractmethod
    async def write_file(self, path: str, content: bytes | str) -> None:
        """Raises `OSError`."""

    @abstractmethod
    async def read_file(self, path: str) -> bytes:
        """Raises `OSError`."""


class ShellSandbox(Sandbox):
    """A sandbox that reads and writes files through its own shell."""

    async def write_file(self, path: str, content: bytes | str) -> None:
        """Writes a file. Relative paths are resolved against `folder`. Raises `OSError`."""
        await self._file("writing", WRITE_FILE, path, content.encode() if isinstance(content, str) else content)

    async def read_file(self, path: str) -> bytes:
        """Reads a file. Relative paths are resolved against `folder`. Raises `OSError`."""
        return await self._file("reading", READ_FILE, path, b"")

    async def _file(self, doing: str, line: str, path: str, data: bytes) -> bytes:
        code, out, err = await self._script(line, path, data)
        if code != 0:
            raise OSError(f"{doing} {path} failed with status {code}: {err[-300:].decode(errors='replace')}")
        return out

    @abstractmethod
    async def _script(self, line: str, path: str, data: bytes) -> tuple[int, bytes, bytes]:
        """Runs a shell line with `path` as $1 and `data` as stdin. Returns (status, stdout, stderr)."""


WRITE_FILE = 'mkdir -p -- "$(dirname -- "$1")" && cat >"$1"'
READ_FILE = 'test -f "$1" || { echo "it is not a plain file" >&2; exit 1; }; cat <"$1"'
"""Shell commands that `ShellSandbox` uses to access files."""

SANDBOXES: Registry[Sandbox] = Registry("sandbox", flag="sandbox", package="slime.agent.sandbox", contract=Sandbox)


async def exec_and_wait(
    sandbox: Sandbox,
    command: str = "",
    *,
    timeout_s: float = 1800.0,
    poll_s: float = 5.0,
    key: str | None = None,
    user: str | None = None,
    env: Mapping[str, str] | None = None,
    cmd: str = "",
    timeout: float | None = None,
) -> ExecResult:
    """Runs a long command through short calls: starts it detached, then polls until it ends.

    `key`: identifies the run; a second call with the same key waits for the same run. `cmd`, `timeout`: the public
    slime's names for `command` and `timeout_s`; with `cmd`, the exit code at the time limit is -1.
    """
    folder = f"{sandbox.folder}/.slime-run-{key or secrets.token_hex(8)}"
    timeout_s = timeout_s if timeout is None else timeout
    at = shlex.quote(folder)
    inner = f"echo $$ >{at}/pid; sh -c {shlex.quote(command or cmd)} >{at}/out 2>{at}/err </dev/null; "
    inner += f"echo $? >{at}/code; mv {at}/code {at}/done"
    start = f"mkdir {at} 2>/dev/null || exit 0; setsid sh -c {shlex.quote(inner)} >/dev/null 2>&1 </dev/null &"
    await sandbox.exec(start, check=True, idempotent=True, user=user, env=env)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        if (await sandbox.exec(f"test -e {at}/done", idempotent=True)).code == 0:
            code, timed_out = int(await sandbox.read_file(f"{folder}/done")), False
            break
        if loop.time() >= deadline:
            await sandbox.exec(f"kill -s KILL -- -$(cat {at}/pid)", idempotent=True, user=user)
            code, timed_out = -1 if cmd else 137, True
            break
        await asyncio.sleep(min(poll_s, max(0.0, deadline - loop.time())))
    out, err = [(await sandbox.read_file(f"{folder}/{name}")).decode(errors="replace") for name in ("out", "err")]
    return ExecResult(code, out, err, timed_out)


def __getattr__(name: str) -> Any:
    if name == "E2BSandbox":  # its module imports this one
        from slime.agent.sandbox.e2b import E2BSandbox

        return E2BSandbox
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
