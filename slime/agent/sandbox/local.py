"""A sandbox on this machine: a process tree with its own namespaces and root (`local_supervisor.py`).

Limits
- Processes: `RLIMIT_NPROC` of an otherwise unused user id.
- Memory: `RLIMIT_AS` of each process, and the total over all processes. While several processes run, the total is
  checked 50 times a second; above the limit, every command is killed.
- Files: the size of the in-memory file systems `/work`, `/tmp` and `/dev/shm`.

Control groups are not used, because containers seldom allow them.

Everything runs on one event loop. `local_supervisor.py` sends the exit statuses of commands through the control socket;
each status wakes its command's caller. This module accepts connections for `reach` on a socket that
`local_supervisor.py` created.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import logging
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from slime.agent.sandbox import SANDBOXES, Command, ExecResult, ShellSandbox
from slime.core.confine import any_user
from slime.core.errors import ConfigError, Unconfined
from slime.core.liveness import load
from slime.core.processes import scratch_prefix

logger = logging.getLogger(__name__)

MAX_OUTPUT_BYTES = 1 << 20
"""Limit for each output stream of a command; any excess is dropped."""
MAX_CONNECTIONS = 64
"""Limit on connections to `reach` per sandbox; each takes two file descriptors of this process."""
MAX_REQUEST_BYTES = 1 << 16
"""Limit on a command including its environment variables."""
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
LOOPBACK = ("127.0.0.1", "localhost")
START_S, FILE_S, KILL_S = 60.0, 60.0, 10.0
PLAIN = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/work", "LANG": "C.UTF-8", "USER": "agent"}


@SANDBOXES.register("local")
@dataclass(kw_only=True)
class LocalSandbox(ShellSandbox):
    """A sandbox on this machine, isolated by Linux namespaces."""

    reach: tuple[str, int] | None = None
    """The only (host, port) that commands can reach; inside, it is 127.0.0.1 with the same port."""
    memory_bytes: int = 1 << 30
    readable: tuple[Path, ...] = ()
    """Files and folders on this machine that commands can read at the same path. They must be world-readable."""
    disk_bytes: int = 256 << 20
    """Limit for each of /work, /tmp and /dev/shm."""
    processes: int = 128
    files: int = 100_000
    """Limit for each of /work, /tmp and /dev/shm."""
    allow_unconfined: bool = False
    """If this machine cannot confine commands, run them as plain processes in a folder under /tmp. Unconfined commands
    can access the network, other processes and all files of their user.
    """
    lifetime_s: float = 3600.0
    """All processes are killed after this time."""
    sandbox_id: str = field(default_factory=lambda: f"local-{secrets.token_hex(6)}", init=False)

    async def __aenter__(self) -> Self:
        for path in self.readable:
            if not path.exists():
                raise ConfigError(
                    f"the sandbox's `readable` contains {path}, which does not exist; create it, or "
                    "drop it from `readable`"
                )
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        try:
            await self._start()
        except Unconfined as refusal:
            if not self.allow_unconfined:
                raise
            if self.reach is not None and self.reach[0] not in LOOPBACK:
                raise ConfigError(
                    f"an unconfined sandbox cannot reach {self.reach[0]}; only loopback is supported"
                ) from None
            logger.warning("running agents UNCONFINED, because allow_unconfined is set: %s", refusal)
            self._scratch = tempfile.TemporaryDirectory(
                prefix=scratch_prefix("unconfined-"), ignore_cleanup_errors=True
            )
            self.folder = self._scratch.name
            await self._start()
        return self

    async def _start(self) -> None:
        self._ended: dict[int, asyncio.Future[int]] = {}
        self._numbers = itertools.count()
        self._server: asyncio.Server | None = None
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        unconfined, uid = self._scratch is not None, any_user()
        settings = {
            "uid": uid,
            "port": self.reach[1] if self.reach else None,
            "folder": self.folder,
            "unconfined": unconfined,
            "memory_bytes": self.memory_bytes,
            "disk_bytes": self.disk_bytes,
            "processes": self.processes,
            "files": self.files,
            "readable": [str(path.absolute()) for path in self.readable],
        }
        if unconfined and os.getuid() == 0:
            os.chown(self.folder, uid, uid)
        script = [sys.executable, "-I", "-S", "-X", "utf8", str(Path(__file__).with_name("local_supervisor.py"))]
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *script,
                *[str(os.getpid()), str(theirs.fileno()), json.dumps(settings)],
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env=PLAIN,
                cwd="/",
                start_new_session=True,
            )
        try:
            await self._begin()
        except BaseException:
            await self.__aexit__()
            raise

    async def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._control.settimeout(START_S * load())
        message, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, self._control, 1 << 16, 1)
        missing = json.loads(message)["missing"] if message else "the supervisor, which failed to start; see stderr"
        if missing is not None:
            raise Unconfined(
                f"this machine cannot confine an agent's commands (missing: {missing}); allow user namespaces "
                "(sysctl user.max_user_namespaces, a container's seccomp profile) on Linux 5.14 or newer, or set "
                "allow_unconfined if this machine is expendable"
            )
        self._control.setblocking(False)
        loop.add_reader(self._control, self._hear)
        self._limit = loop.call_later(self.lifetime_s, self._kill)
        if descriptors and self.reach is not None:
            forwarding = Forwarding(self.sandbox_id, *self.reach)
            self._server = await asyncio.start_server(forwarding, sock=socket.socket(fileno=descriptors[0]))

    async def __aexit__(self, *error: object) -> None:
        if hasattr(self, "_limit"):
            self._limit.cancel()
        if self._server is not None:
            self._server.close()
        asyncio.get_running_loop().remove_reader(self._control)
        self._kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_S):
                await self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        # The kernel closes the other end when the namespace's last process exits.
        self._control.settimeout(KILL_S)
        with contextlib.suppress(OSError):
            while await asyncio.to_thread(self._control.recv, 1 << 16):
                pass
        self._control.close()
        self._lost()
        if self._scratch is not None:
            self._scratch.cleanup()

    def _kill(self) -> None:
        if self._scratch is not None:  # no namespace: the supervisor kills its processes when the socket closes
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def _lost(self) -> None:
        for waiting in self._ended.values():
            if not waiting.done():
                waiting.set_result(137)

    def _hear(self) -> None:
        try:
            message = self._control.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            asyncio.get_running_loop().remove_reader(self._control)
            self._lost()
            return
        said: dict[str, Any] = json.loads(message)
        waiting = self._ended.get(said["id"])
        if waiting is not None and not waiting.done():
            waiting.set_result(said["code"])

    async def _exec(self, command: Command) -> ExecResult:
        """Runs a command. Raises `ConfigError` for any user except `agent`."""
        if command.user not in (None, "agent"):
            raise ConfigError(
                f"user {command.user} is not supported: a local sandbox runs every command as agent; omit the user"
            )
        code, out, err, late = await self._run([command.line], b"", command.env, command.timeout_s, MAX_OUTPUT_BYTES)
        return ExecResult(code, out.decode(errors="replace"), err.decode(errors="replace"), late)

    async def _script(self, line: str, path: str, data: bytes) -> tuple[int, bytes, bytes]:
        """Runs inside the sandbox, so symlinks cannot escape it."""
        code, out, err, _ = await self._run([line, "sh", path], data, {}, FILE_S, self.disk_bytes)
        return code, out, err

    async def _run(
        self, line: list[str], stdin: bytes, env: Mapping[str, str], timeout_s: float, most: int
    ) -> tuple[int, bytes, bytes, bool]:
        """Runs a command. Returns (status, stdout, stderr, whether it exceeded the time limit)."""
        number, loop = next(self._numbers), asyncio.get_running_loop()
        request = json.dumps({"id": number, "run": line, "env": {**PLAIN, "HOME": self.folder, **env}}).encode()
        if len(request) > MAX_REQUEST_BYTES:
            raise ConfigError(
                f"the command has {len(request)} bytes, but the limit is {MAX_REQUEST_BYTES}; put it into a file"
            )
        source = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with open(source, "r+b", buffering=0) as file, _Pipe(loop, most) as out, _Pipe(loop, most) as err:
            file.write(stdin)
            file.seek(0)
            fcntl.fcntl(source, fcntl.F_ADD_SEALS, SEALS)  # otherwise a command could grow it beyond the limits
            waiting = self._ended[number] = loop.create_future()
            late = False
            try:
                await asyncio.sleep(0)
                socket.send_fds(self._control, [request], [source, out.theirs, err.theirs])
                await asyncio.wait([waiting], timeout=timeout_s)
                if not waiting.done():
                    late = True
                    self._control.send(json.dumps({"kill": number}).encode())
                    await asyncio.wait([waiting], timeout=KILL_S)
            except OSError:
                self._lost()
            finally:
                if not waiting.done():
                    with contextlib.suppress(OSError):
                        self._control.send(json.dumps({"kill": number}).encode())
                del self._ended[number]
            out.drain()
            err.drain()
            return (waiting.result() if waiting.done() else 137), bytes(out.data), bytes(err.data), late


class _Pipe:
    """Reads an output stream of a command until the command ends. Background processes may hold it open longer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, most: int) -> None:
        self.data, self._loop, self._most = bytearray(), loop, most

    def __enter__(self) -> Self:
        self._ours, self.theirs = os.pipe()
        os.set_blocking(self._ours, False)
        self._loop.add_reader(self._ours, self._take)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.remove_reader(self._ours)
        os.close(self._ours)
        os.close(self.theirs)

    def _take(self) -> bool:
        try:
            taken = os.read(self._ours, 1 << 16)
        except BlockingIOError:
            return False
        self.data += taken[: max(0, self._most - len(self.data))]
        return bool(taken)

    def drain(self) -> None:
        """Reads what the pipe contains now, but nothing that background processes write later."""
        for _ in range(16):
            if not self._take():
                return


class Forwarding:
    """Forwards a sandbox's connections to its `reach` target, up to `MAX_CONNECTIONS` at a time."""

    def __init__(self, sandbox_id: str, host: str, port: int) -> None:
        self._sandbox_id, self._far, self._open, self._refused = sandbox_id, (host, port), 0, False

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            if self._open >= MAX_CONNECTIONS:
                self._refuse(writer)
                return
            self._open += 1
            try:
                far_reader, far_writer = await asyncio.open_connection(*self._far)
                with contextlib.closing(far_writer):
                    await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
            except OSError:
                return
            finally:
                self._open -= 1

    def _refuse(self, writer: asyncio.StreamWriter) -> None:
        """Sends the reason as an HTTP response, because clients expect an adapter to answer, and logs it once."""
        why = f"this sandbox has more than {MAX_CONNECTIONS} open connections; close some\n"
        head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nContent-Length: {len(why)}"
        writer.write(f"{head}\r\nConnection: close\r\n\r\n{why}".encode())
        if not self._refused:
            logger.warning("%s: %s", self._sandbox_id, why.strip())
        self._refused = True


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies bytes until either side closes."""
    with contextlib.suppress(OSError):
        while taken := await reader.read(1 << 16):
            writer.write(taken)
            await writer.drain()
        writer.write_eof()
