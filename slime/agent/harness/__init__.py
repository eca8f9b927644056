"""Harnesses: agent programs that run in a sandbox and connect to an adapter.

    result = await ClaudeCodeHarness().run(sandbox, "Fix the bug.", url=adapter_url, key=key, folder="/work")

A harness defines the package to install, the files and environment variables that restrict the program to the adapter,
and the command line for a prompt. Harnesses have no access to sessions or samples.
"""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from slime.core.errors import SlimeError

if TYPE_CHECKING:
    from slime.agent.harness.builtin import ClaudeCodeHarness, CodexHarness

__all__ = [
    "MODEL",
    "ClaudeCodeHarness",
    "CodexHarness",
    "Harness",
    "HarnessFailed",
    "HarnessResult",
    "Place",
    "Shell",
]

MODEL = "slime"
"""The model name that programs send in their requests."""


class Shell(Protocol):
    """The methods of a sandbox that a harness uses."""

    async def exec(self, command: str, *, env: Mapping[str, str] | None = None, timeout_s: float = ...) -> Any: ...

    async def write_file(self, path: str, content: str | bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where a program runs, and which adapter, session and model it uses."""

    url: str
    """The adapter's URL as seen from the sandbox, without a path."""
    key: str
    """The session's API key."""
    home: str
    """Home directory for the program's settings."""
    folder: str
    """The working directory."""
    model: str = MODEL


@dataclass(frozen=True, slots=True)
class HarnessResult:
    code: int
    output: str
    timed_out: bool


class HarnessFailed(SlimeError):
    """A program could not be installed or started."""


class Harness(ABC):
    name: ClassVar[str]
    package: ClassVar[str | None] = None
    """npm package and version; None if there is nothing to install."""

    @abstractmethod
    def command(self, prompt: str, place: Place) -> Sequence[str]:
        """Returns the command that runs the program on `prompt` without asking for confirmation, and then exits."""

    def files(self, place: Place) -> Mapping[str, str]:
        """Returns the program's settings files: absolute path -> content."""
        return {}

    def environment(self, place: Place) -> Mapping[str, str]:
        """Returns the program's environment variables, except HOME."""
        return {}

    async def install(self, sandbox: Shell, *, prefix: str = "/opt/agents", limit_s: float = 600.0) -> None:
        """Installs the program in a sandbox that has access to npm. Raises `HarnessFailed`."""
        if self.package is None:
            return
        done = await sandbox.exec(f"npm install --prefix {prefix} {self.package}", timeout_s=limit_s)
        if done.code:
            raise HarnessFailed(f"npm install {self.package} exited with {done.code}: {done.stderr[-500:]}")

    async def install_cli(self, sandbox: Shell, **given: Any) -> None:
        """The public slime's name for `install`."""
        await self.install(sandbox, **given)

    async def write_config(
        self, sandbox: Shell, *, url: str, key: str, folder: str = "/work", home: str = "/root", model: str = MODEL
    ) -> None:
        """Writes the program's settings files."""
        for file, text in self.files(Place(url, key, home, folder, model)).items():
            await sandbox.write_file(file, text)

    async def run(
        self,
        sandbox: Shell,
        prompt: str,
        *,
        url: str,
        key: str,
        folder: str,
        home: str = "/root",
        model: str = MODEL,
        path: str | None = None,
        flags: Sequence[str] = (),
        timeout_s: float = 1800.0,
    ) -> HarnessResult:
        """Writes the settings files, and runs the program on a prompt until it exits, for at most `timeout_s`.

        `path`: replaces the sandbox's PATH. `flags`: extra arguments at the end of the command line.
        """
        await self.write_config(sandbox, url=url, key=key, folder=folder, home=home, model=model)
        place = Place(url, key, home, folder, model)
        env = {"HOME": home, "TERM": "dumb", **self.environment(place)}
        if path is not None:
            env["PATH"] = path
        command = f"cd {shlex.quote(folder)} && {shlex.join([*self.command(prompt, place), *flags])} </dev/null"
        done = await sandbox.exec(command, env=env, timeout_s=timeout_s)
        return HarnessResult(done.code, done.stdout + done.stderr, done.timed_out)


def __getattr__(name: str) -> Any:
    if name in ("ClaudeCodeHarness", "CodexHarness"):  # their module imports this one
        from slime.agent.harness import builtin

        return getattr(builtin, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
