"""A sandbox in a container, run through the docker or podman CLI, for tasks that bring their own image.

The container runs as an unprivileged user without network or capabilities; control groups limit memory and processes.
`reach` works through a Unix socket on this machine, in a mounted folder. A small Python program in the container
forwards connections to this socket, so the image must have Python.

Every client process (`docker exec`) is awaited for at most the command's limit plus `CLIENT_S`.

Invariants
1. The container ends when the stdin of the client that started it closes, and at the latest after `lifetime_s`. So it
   dies with this process, and is removed along with its files.
2. Command lines, environment variables and files are passed through stdin, so no process list shows them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shlex
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from slime.agent.sandbox import SANDBOXES, Command, ExecResult, ShellSandbox
from slime.agent.sandbox.local import MAX_OUTPUT_BYTES, Forwarding
from slime.core.errors import ConfigError, Unconfined
from slime.core.processes import scratch_prefix, socket_room

RUNTIMES = ("docker", "podman")
START_S, FILE_S, CLIENT_S = 600.0, 60.0, 30.0
"""Time limits. Starting may download the image; a client may take `CLIENT_S` longer than its command."""
MOUNTED, SOCKET, FORWARDER = "/run/slime", "reach.sock", "forward.py"
READY = "ready"
FORWARD = """\
import asyncio, sys
async def copy(source, sink):
    try:
        while taken := await source.read(65536):
            sink.write(taken)
            await sink.drain()
        sink.write_eof()
    except OSError:
        pass
async def one(reader, writer):
    far_reader, far_writer = await asyncio.open_unix_connection(sys.argv[1])
    await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))
    far_writer.close()
    writer.close()
async def main():
    server = await asyncio.start_server(one, "127.0.0.1", int(sys.argv[2]))
    print("ready", flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


@SANDBOXES.register("container")
@dataclass(kw_only=True)
class ContainerSandbox(ShellSandbox):
    """A sandbox in a docker or podman container."""

    image: str
    """Must have `sh`, `timeout` and `sleep`, as nearly all images do, and Python if `reach` is used."""
    runtime: str | None = None
    """docker or podman; None: the first one that is installed."""
    reach: tuple[str, int] | None = None
    """The only (host, port) that commands can reach; inside, it is 127.0.0.1 with the same port."""
    readable: tuple[Path, ...] = ()
    """Files and folders on this machine that commands can read at the same path."""
    memory_bytes: int = 2 << 30
    disk_bytes: int = 1 << 30
    """Limit for each of /tmp and /work, which are kept in memory if `read_only` is set."""
    processes: int = 256
    read_only: bool = True
    """Makes the image read-only, with empty /tmp and /work. Set to False if the image has files there or modifies
    its own files.
    """
    network: str = "none"
    """Value for `docker run --network`."""
    user: str = "1000:1000"
    lifetime_s: float = 3600.0
    """The container is killed after this time."""
    sandbox_id: str = field(default_factory=lambda: f"slime-{secrets.token_hex(6)}", init=False)

    async def __aenter__(self) -> Self:
        self._client = self._program()
        self._server: asyncio.Server | None = None
        self._main: asyncio.subprocess.Process | None = None
        self._forwarder: asyncio.subprocess.Process | None = None
        prefix = scratch_prefix("container-")
        room = socket_room(f"{prefix}XXXXXXXX/mounted/{SOCKET}")
        self._shared = tempfile.TemporaryDirectory(prefix=prefix, dir=room)
        try:
            if self.reach is not None:
                await self._listen(*self.reach)
            await self._begin()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    def _program(self) -> str:
        wanted = RUNTIMES if self.runtime is None else (self.runtime,)
        found = next((path for path in map(shutil.which, wanted) if path), None)
        if found is None:
            names = " or ".join(wanted)
            raise ConfigError(f"a container sandbox requires {names}; install one, or use the local sandbox")
        return found

    async def _listen(self, host: str, port: int) -> None:
        """Listens on the socket for `reach`. Mounts a subfolder, because the parent folder is private to this user."""
        folder = Path(self._shared.name, "mounted")
        folder.mkdir(mode=0o755)
        (folder / FORWARDER).write_text(FORWARD)
        self._server = await asyncio.start_unix_server(Forwarding(self.sandbox_id, host, port), str(folder / SOCKET))
        (folder / SOCKET).chmod(0o666)

    def _run_command(self) -> list[str]:
        uid = self.user.partition(":")[0]
        command = [self._client, "run", "--rm", "--interactive", "--init", "--name", self.sandbox_id]
        command += ["--network", self.network, "--user", self.user, "--workdir", self.folder, "--hostname", "sandbox"]
        command += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        command += ["--memory", str(self.memory_bytes), "--memory-swap", str(self.memory_bytes)]
        command += ["--pids-limit", str(self.processes), "--label", f"slime.parent={os.getpid()}"]
        if self.read_only:
            given = f"rw,exec,nosuid,nodev,size={self.disk_bytes},mode=0700,uid={uid}"
            command += ["--read-only", "--tmpfs", f"/tmp:{given}", "--tmpfs", f"{self.folder}:{given}"]
        for path in self.readable:
            command += ["--volume", f"{path.absolute()}:{path.absolute()}:ro"]
        if self.reach is not None:
            command += ["--volume", f"{self._shared.name}/mounted:{MOUNTED}:ro"]
        lives = f"echo {READY}; exec timeout -s KILL {self.lifetime_s:.0f} cat >/dev/null"
        return [*command, "--entrypoint", "sh", self.image, "-c", lives]

    async def _begin(self) -> None:
        self._main = await self._started(self._run_command())
        await self._ready(self._main, f"container of {self.image}")
        if self.reach is not None:
            inside = ["python3", "-I", f"{MOUNTED}/{FORWARDER}", f"{MOUNTED}/{SOCKET}", str(self.reach[1])]
            self._forwarder = await self._started([*self._inside(self.user), *inside])
            await self._ready(self._forwarder, f"python3 in {self.image}, which `reach` requires")

    async def _started(self, command: list[str]) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )

    async def _ready(self, process: asyncio.subprocess.Process, what: str) -> None:
        """Waits until the client's program reports that it is ready. Raises `Unconfined` if it exits."""
        assert process.stdout is not None, "stdout must be a pipe"
        async with asyncio.timeout(START_S):
            if (await process.stdout.readline()).decode().strip() != READY:
                error = (await process.communicate())[1][-500:].decode(errors="replace").strip()
                raise Unconfined(f"could not start the {what}; {self._client} reports: {error}")

    def _inside(self, user: str) -> list[str]:
        return [self._client, "exec", "--interactive", "--user", user, self.sandbox_id]

    async def __aexit__(self, *error: object) -> None:
        if self._server is not None:
            self._server.close()
        if self._main is not None and self._main.returncode is None:
            assert self._main.stdin is not None, "stdin must be a pipe"
            self._main.stdin.close()
            await self._run([self._client, "rm", "--force", self.sandbox_id], b"", CLIENT_S)  # immediately
        for client in (self._forwarder, self._main):
            if client is not None:
                await _ended(client)
        self._shared.cleanup()

    async def _exec(self, command: Command) -> ExecResult:
        lines = [*(f"export {name}={shlex.quote(value)}" for name, value in command.env.items()), command.bounded]
        client = [*self._inside(command.user or self.user), "sh"]
        began = asyncio.get_running_loop().time()
        code, out, err = await self._run(client, "\n".join(lines).encode(), command.timeout_s + CLIENT_S)
        late = code == 137 and asyncio.get_running_loop().time() - began >= command.timeout_s
        return ExecResult(code, out.decode(errors="replace"), err.decode(errors="replace"), late)

    async def _script(self, line: str, path: str, data: bytes) -> tuple[int, bytes, bytes]:
        return await self._run([*self._inside(self.user), "sh", "-c", line, "sh", path], data, FILE_S, self.disk_bytes)

    async def _run(
        self, client: list[str], stdin: bytes, limit_s: float, most: int = MAX_OUTPUT_BYTES
    ) -> tuple[int, bytes, bytes]:
        """Runs a client. Returns (status, stdout, stderr), with status 137 if it exceeds the limit."""
        process = await self._started(client)
        assert process.stdin and process.stdout and process.stderr, "all must be pipes"
        out, err = bytearray(), bytearray()
        work = asyncio.gather(
            _feed(process.stdin, stdin), _take(process.stdout, out, most), _take(process.stderr, err, most)
        )
        try:
            async with asyncio.timeout(limit_s):
                await work
                code = await process.wait()
        except TimeoutError:
            code = 137
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        return (128 - code if code < 0 else code), bytes(out), bytes(err)


async def _ended(client: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLIENT_S):
            await client.wait()
    with contextlib.suppress(ProcessLookupError):
        client.kill()
    await client.wait()


async def _feed(sink: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(OSError):
        sink.write(data)
        await sink.drain()
    sink.close()


async def _take(source: asyncio.StreamReader, into: bytearray, most: int) -> None:
    while taken := await source.read(1 << 16):
        into += taken[: max(0, most - len(into))]
