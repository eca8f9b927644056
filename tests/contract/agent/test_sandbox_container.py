"""The command lines that a sandbox in a container gives to `docker`, and what becomes of their ends.

No daemon runs where these tests do: a stand-in checks and plays them. What a container confines is docker's promise.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from slime.agent.sandbox import CommandFailed, exec_and_wait
from slime.agent.sandbox.container import ContainerSandbox
from slime.core.errors import ConfigError, Unconfined
from slime.core.processes import OF_LIBRARIES, longest_room

STAND_IN = Path(__file__).parents[2] / "support" / "docker_stand_in.py"


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in is `docker`, first of the PATH; returns its folder."""
    programs, folder = tmp_path / "bin", tmp_path / "docker"
    programs.mkdir()
    (folder / "work").mkdir(parents=True)
    (programs / "docker").write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} {folder} "$@"\n')
    (programs / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return folder


def inside(body: Callable[[ContainerSandbox], Awaitable[None]], **settings: Any) -> None:
    async def go() -> None:
        async with ContainerSandbox(**{"image": "python:3.12", **settings}) as sandbox:
            await body(sandbox)

    asyncio.run(go())


def calls(folder: Path) -> list[Any]:
    """[verb, flags, rest] of each call."""
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


async def nothing(_: ContainerSandbox) -> None: ...


def test_a_container_has_no_network_no_rights_and_bounds(docker: Path) -> None:
    inside(nothing, memory_bytes=1 << 30, processes=64, readable=(docker,))
    (verb, flags, rest), *_, last = calls(docker)
    given = dict(flags)
    assert verb == "run" and rest[0] == "python:3.12" and last[0] == "rm" and last[2] == [given["--name"]]
    wanted = {
        "--network": "none",
        "--user": "1000:1000",
        "--cap-drop": "ALL",
        "--security-opt": "no-new-privileges",
        "--memory": str(1 << 30),
        "--memory-swap": str(1 << 30),
        "--pids-limit": "64",
        "--volume": f"{docker}:{docker}:ro",
        "--entrypoint": "sh",
    }
    assert wanted.items() <= given.items() and {"--rm", "--init", "--read-only", "--interactive"} <= given.keys()
    assert [value.split(":")[0] for flag, value in flags if flag == "--tmpfs"] == ["/tmp", "/work"]
    assert "docker.sock" not in json.dumps(flags) and "--privileged" not in given


def test_commands_and_files(docker: Path) -> None:
    async def body(sandbox: ContainerSandbox) -> None:
        await sandbox.write_file("deep/it's.txt", "text")
        assert await sandbox.read_file("deep/it's.txt") == b"text"
        ended = await sandbox.exec('echo "$WORD"; cat; echo no >&2; exit 3', env={"WORD": "it's $HOME"}, user="root")
        assert (ended.code, ended.stdout, ended.stderr, ended.timed_out) == (3, "it's $HOME\n", "no\n", False)
        with pytest.raises(CommandFailed, match="status 3"):
            await sandbox.exec("exit 3", check=True)
        with pytest.raises(OSError, match=r"reading .* failed with status"):
            await sandbox.read_file("missing")
        late = await sandbox.exec("echo begun; sleep 60", timeout_s=1)
        assert late.timed_out and late.stdout == "begun\n" and late.code == 137

    inside(body)
    made = [call for call in calls(docker) if call[0] == "exec"]
    assert {dict(flags)["--user"] for _, flags, _ in made} == {"1000:1000", "root"}
    assert not [call for call in made if "WORD" in json.dumps(call)], "a process list shows a variable"


def test_what_may_be_reached_is_reached(docker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a temporary folder that leaves too little space for the path of a socket."""
    temporary = tmp_path / ("t" * (longest_room(OF_LIBRARIES) - len(str(tmp_path)) - 1))
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    server, free = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    inner = free.getsockname()[1]
    free.close()
    (docker / "port").write_text(str(inner))

    def answer() -> None:
        other, _ = server.accept()
        with other:
            other.sendall(other.recv(9) + b"word")

    threading.Thread(target=answer, daemon=True).start()

    async def body(sandbox: ContainerSandbox) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", inner)
        writer.write(b"a ")
        assert await reader.read() == b"a word"
        writer.close()

    inside(body, reach=("127.0.0.1", server.getsockname()[1]))


def test_a_long_command_runs_once(docker: Path) -> None:
    async def body(sandbox: ContainerSandbox) -> None:
        key = sandbox.sandbox_id
        for _ in range(2):
            ended = await exec_and_wait(sandbox, "echo x >>count; cat count", timeout_s=30, poll_s=0.1, key=key)
            assert (ended.code, ended.stdout) == (0, "x\n")

    inside(body)


def test_what_is_missing_is_named(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unconfined, match="Unable to find image"):
        inside(nothing, image="missing")
    with pytest.raises(ConfigError, match="requires podman"):
        inside(nothing, runtime="podman")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="docker or podman"):
        inside(nothing)
