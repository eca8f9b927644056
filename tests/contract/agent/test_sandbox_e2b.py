"""A sandbox at E2B against a small service in this process, which loses requests as a network does.

Where the package is installed, its signatures are what the calls are checked against.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slime.agent import sandbox as public
from slime.agent.sandbox import E2BSandbox, exec_and_wait
from slime.agent.sandbox import e2b as ours
from slime.core.errors import ConfigError

REAL = importlib.import_module("e2b") if importlib.util.find_spec("e2b") else None


class SandboxException(Exception):
    """As the package's: the root of the errors of a sandbox."""

    def __init__(self, *words: object, status_code: int | None = None) -> None:
        super().__init__(*words)
        self.status_code = status_code


class TimeoutException(SandboxException): ...


class SandboxNotRunningException(TimeoutException): ...


class NotFoundException(SandboxException): ...


class RateLimitException(SandboxException): ...


class ServiceBusyException(Exception): ...


class CommandExitException(SandboxException):
    """A command that ended with another status than 0."""

    def __init__(self, exit_code: int, stdout: str, stderr: str) -> None:
        super().__init__("exit")
        self.exit_code, self.stdout, self.stderr = exit_code, stdout, stderr


@dataclass
class Ended:
    exit_code: int
    stdout: str
    stderr: str


class Service:
    """Commands and files in a folder of this host."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lost: deque[Exception] = deque()
        """Popped by each request, which then fails."""
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.sandbox_id, self.commands, self.files = "remote-1", self, self

    def called(self, name: str, real: Callable[[Any], Any], **given: Any) -> None:
        self.calls.append((name, given))
        if REAL is not None:
            inspect.signature(real(REAL)).bind(*(() if name == "create" else (None,)), **given)
        if self.lost:
            raise self.lost.popleft()

    async def create(self, **given: Any) -> Service:
        self.called("create", lambda e2b: e2b.AsyncSandbox.create, **given)
        return self

    async def kill(self) -> bool:
        self.called("kill", lambda e2b: lambda self: None)
        return True

    async def run(self, cmd: str, **given: Any) -> Ended:
        self.called("run", lambda e2b: e2b.sandbox_async.commands.command.Commands.run, cmd=cmd, **given)
        process = await asyncio.create_subprocess_exec(
            *("sh", "-c", cmd),
            cwd=self.folder,
            env={"PATH": "/usr/bin:/bin", **given["envs"]},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        code = process.returncode or 0
        ended = (128 - code if code < 0 else code, out.decode(), err.decode())
        if code:
            raise CommandExitException(*ended)
        return Ended(*ended)

    async def write(self, path: str, data: bytes | str, **given: Any) -> None:
        filesystem = "e2b.sandbox_async.filesystem.filesystem"
        real = lambda _: importlib.import_module(filesystem).Filesystem.write  # noqa: E731
        self.called("write", real, path=path, data=data, **given)
        (self.folder / path).write_bytes(data.encode() if isinstance(data, str) else data)

    async def read(self, path: str, **given: Any) -> bytearray:
        filesystem = "e2b.sandbox_async.filesystem.filesystem"
        real = lambda _: importlib.import_module(filesystem).Filesystem.read  # noqa: E731
        self.called("read", real, path=path, **given)
        if not (self.folder / path).exists():
            raise NotFoundException(f"path {path} does not exist")
        return bytearray((self.folder / path).read_bytes())


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    """Stands for the package `e2b`; pauses between tries are short."""
    stand_in, made = ModuleType("e2b"), Service(tmp_path)
    kinds = (SandboxException, TimeoutException, SandboxNotRunningException, NotFoundException, RateLimitException)
    for kind in (*kinds, ServiceBusyException, CommandExitException):
        setattr(stand_in, kind.__name__, kind)
    stand_in.AsyncSandbox, stand_in.ALL_TRAFFIC = made, "0.0.0.0/0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "e2b", stand_in)
    monkeypatch.setattr(ours, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(E2BSandbox, "folder", str(tmp_path))
    return made


def inside(body: Callable[[E2BSandbox], Awaitable[None]], **settings: Any) -> None:
    async def go() -> None:
        async with E2BSandbox(**settings) as sandbox:
            await body(sandbox)

    asyncio.run(go())


async def nothing(_: E2BSandbox) -> None: ...


def test_the_public_variables_are_read(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    inside(nothing, image="a-template")
    monkeypatch.setenv("SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY", "image")
    monkeypatch.setenv("SLIME_AGENT_SANDBOX_LIFETIME_SEC", "77")
    monkeypatch.setenv("SLIME_AGENT_E2B_SANDBOX_SIZE", "small")
    inside(nothing, image="registry/image:1", reach=("adapter.example", 443))
    plain, named = [given for name, given in service.calls if name == "create"]
    assert (plain["template"], plain["metadata"], plain["timeout"]) == ("a-template", {}, 3600)
    assert plain["allow_internet_access"] is False and plain["network"] is None
    assert (named["template"], named["timeout"]) == (None, 77)
    assert named["metadata"] == {"image": "registry/image:1", "size": "small"}
    assert named["network"] == {"deny_out": ["0.0.0.0/0"], "allow_out": ["adapter.example"]}
    assert [name for name, _ in service.calls].count("kill") == 2


def test_what_is_lost_is_sent_again_and_commands_are_not(service: Service) -> None:
    """Law: a command runs twice only where that was said to do no harm."""

    async def body(sandbox: E2BSandbox) -> None:
        service.lost.extend([RateLimitException("429"), SandboxException("late", status_code=502)])
        await sandbox.write_file("a", "text")
        service.lost.append(ConnectionResetError())
        assert await sandbox.read_file("a") == b"text"
        service.lost.append(TimeoutException("late"))
        with pytest.raises(TimeoutException):
            await sandbox.exec("echo x >>count")
        service.lost.append(TimeoutException("late"))
        assert (await sandbox.exec("cat a", idempotent=True)).stdout == "text"
        for lasting in (SandboxException("400", status_code=400), SandboxNotRunningException("gone")):
            service.lost.append(lasting)
            with pytest.raises(SandboxException):
                await sandbox.exec("cat a", idempotent=True)
        service.lost.append(ServiceBusyException())  # of its end

    service.lost.append(ServiceBusyException())
    inside(body)
    assert not service.lost and not (service.folder / "count").exists()


def test_retries_end(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_AGENT_SANDBOX_RPC_RETRIES", "2")
    service.lost.extend([ServiceBusyException()] * 3)
    with pytest.raises(ServiceBusyException):
        inside(nothing)
    assert [name for name, _ in service.calls] == ["create"] * 3


def test_commands_and_files(service: Service) -> None:
    async def body(sandbox: E2BSandbox) -> None:
        assert sandbox.sandbox_id == "remote-1"
        ended = await sandbox.exec('echo "$WORD"; echo no >&2; exit 3', env={"WORD": "it's"})
        assert (ended.code, ended.stdout, ended.stderr, ended.timed_out) == (3, "it's\n", "no\n", False)
        late = await sandbox.exec("echo begun; sleep 60", timeout_s=1)
        assert late.timed_out and late.stdout == "begun\n"
        with pytest.raises(OSError, match="could not read missing"):
            await sandbox.read_file("missing")
        service.lost.extend([TimeoutException("late")] * 2)
        done = await exec_and_wait(sandbox, "echo done", timeout_s=30, poll_s=0.1, key=service.folder.name)
        assert (done.code, done.stdout) == (0, "done\n")

    inside(body)


def test_the_package_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: the public names need no package; a sandbox names what to install."""
    assert {"Sandbox", "E2BSandbox", "exec_and_wait"} <= set(public.__all__) and public.E2BSandbox is E2BSandbox
    monkeypatch.setitem(sys.modules, "e2b", None)
    with pytest.raises(ConfigError, match=r"slime\[e2b\]"):
        inside(nothing)
