"""Where an agent's commands run. One file per kind of sandbox; `LocalSandbox` needs nothing but this machine.

    async with LocalSandbox(reach=("127.0.0.1", adapter_port)) as sandbox:
        await sandbox.write_file("main.py", "print(1)")
        ended = await sandbox.exec("python3 main.py", timeout_s=10)

Invariants
1. After `async with` nothing of a sandbox runs.
2. Several commands of a sandbox share its files, and processes that a command left behind, until the end.
"""

from __future__ import annotations

import asyncio
import math
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping
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
    """How a command ended."""

    code: int
    """Exit status; 128 + signal if a signal ended it."""
    stdout: str
    stderr: str
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """What `Sandbox.exec` was asked to run."""

    line: str
    """Of shell."""
    user: str | None
    """None: the sandbox's own."""
    env: Mapping[str, str]
    timeout_s: float
    idempotent: bool
    """It may be sent twice."""

    @property
    def bounded(self) -> str:
        """A line that ends with status 137 at the limit, for a sandbox whose image has `timeout`."""
        return f"exec timeout -s KILL {math.ceil(self.timeout_s)} sh -c {shlex.quote(self.line)} </dev/null"


class CommandFailed(RuntimeError):
    """A command that was to be checked ended with another status than 0."""


class Sandbox(ABC):
    """A place for commands, from `async with` on until its end."""

    name: ClassVar[str]
    folder: str = "/work"
    """Where commands begin, and what relative paths of files are below."""
    sandbox_id: str
    """Names it in logs; set once it has begun."""

    @abstractmethod
    async def __aenter__(self) -> Self:
        """Begins it. Raises `Unconfined` or `ConfigError` where that cannot be, with what is missing."""

    @abstractmethod
    async def __aexit__(self, *error: object) -> None:
        """Ends it with all that runs in it."""

    async def exec(
        self,
        command: str,
        *,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        check: bool = False,
        idempotent: bool = False,
    ) -> ExecResult:
        """Runs a line of shell in `folder`. `check`: raises `CommandFailed` for another status than 0. `idempotent`: a
        sandbox that is far away may send it again when the answer got lost."""
        with waiting(), traced("tool: command", sandbox=self.sandbox_id):
            result = await self._exec(Command(command, user, env or {}, timeout_s, idempotent))
        if check and (result.code != 0 or result.timed_out):
            why = "its time limit" if result.timed_out else f"status {result.code}"
            raise CommandFailed(f"got {why} from {command[:200]!r}: {result.stderr[-500:]}")
        return result

    @abstractmethod
    async def _exec(self, command: Command) -> ExecResult:
        """Runs a command, whatever its status will be."""

    @abstractmethod
    async def write_file(self, path: str, content: bytes | str) -> None:
        """Writes a file of the sandbox; raises `OSError`."""

    @abstractmethod
    async def read_file(self, path: str) -> bytes:
        """Reads a file of the sandbox; raises `OSError`."""


WRITE_FILE = 'mkdir -p -- "$(dirname -- "$1")" && cat >"$1"'
READ_FILE = 'test -f "$1" || { echo "got something else than a plain file" >&2; exit 1; }; cat <"$1"'
"""Lines of shell for a sandbox that has nothing better: $1 is the path."""

SANDBOXES: Registry[Sandbox] = Registry("sandbox", flag="sandbox", package="slime.agent.sandbox", contract=Sandbox)


async def exec_and_wait(
    sandbox: Sandbox, command: str, *, timeout_s: float, poll_s: float = 5.0, key: str
) -> ExecResult:
    """A long command by short calls: it runs detached, and its end is polled for.

    `key`: names this run; the same key again waits for the same run instead of starting a second one.
    """
    folder = f"{sandbox.folder}/.slime-run-{key}"
    at = shlex.quote(folder)
    inner = f"echo $$ >{at}/pid; sh -c {shlex.quote(command)} >{at}/out 2>{at}/err </dev/null; "
    inner += f"echo $? >{at}/code; mv {at}/code {at}/done"
    start = f"mkdir {at} 2>/dev/null || exit 0; setsid sh -c {shlex.quote(inner)} >/dev/null 2>&1 </dev/null &"
    await sandbox.exec(start, check=True, idempotent=True)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        if (await sandbox.exec(f"test -e {at}/done", idempotent=True)).code == 0:
            code, timed_out = int(await sandbox.read_file(f"{folder}/done")), False
            break
        if loop.time() >= deadline:
            await sandbox.exec(f"kill -s KILL -- -$(cat {at}/pid)", idempotent=True)
            code, timed_out = 137, True
            break
        await asyncio.sleep(min(poll_s, max(0.0, deadline - loop.time())))
    out, err = [(await sandbox.read_file(f"{folder}/{name}")).decode(errors="replace") for name in ("out", "err")]
    return ExecResult(code, out, err, timed_out)


def __getattr__(name: str) -> Any:
    """`E2BSandbox` is a public name of this package; its module imports this one."""
    if name == "E2BSandbox":
        from slime.agent.sandbox.e2b import E2BSandbox

        return E2BSandbox
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
