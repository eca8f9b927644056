"""The parent's side of one grader process: start, ask, kill.

Consumes: requests of the pool (`ask`), as JSON. Produces: the replies of the process. Waits for: the reply frame with
the request's id, without a limit; the limit is the pool's. Is woken by: the reader task, which resolves the future of
that id, or fails all of them when the process ends. All methods run on one event loop.

Invariants
1. After `kill` the process is reaped and both pipes are closed, whatever is unread and whoever else holds them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import pickle
import signal
import sys
from dataclasses import dataclass
from typing import Any

from slime.core.errors import SlimeError
from slime.rewards.environment import grader_environment
from slime.rewards.worker import HEADER

MAX_REPLY_BYTES = 2**26
START_TIMEOUT_S = 60.0
"""Limit of starting the interpreter and taking the settings; grading has its own."""


class GraderDied(SlimeError, RuntimeError):
    """The grader process ended before it answered."""


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """What each grader process is started with."""

    limit_s: float
    """Seconds after which the pool gives up on a sample."""
    memory_limit_bytes: int | None
    """Address space of the process; None: no limit."""
    args: object
    """Handed to the user's functions; must pickle."""


class GraderProcess:
    """One running worker. Create with `start`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read(), name=f"grader-{process.pid}-reader")
        self._write_lock = asyncio.Lock()
        self.dead = False
        self.num_reserved = 0
        """Requests that the pool has given to this process; the pool's to count."""

    @classmethod
    async def start(cls, settings: ProcessSettings, *, warm_up: dict[str, Any], offline: bool) -> GraderProcess:
        """Starts a worker in its own process group; returns when the grader of `warm_up` is loaded.

        `offline`: for graders that only compute; without network, where the kernel permits, and without `args`.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "slime.rewards.worker",
            str(os.getpid()),
            *(["offline"] if offline else []),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={
                **grader_environment(os.environ, offline=offline),
                "PYTHONPATH": os.pathsep.join(_import_path()),
            },
        )
        worker = cls(process)
        message = {
            "limit_s": settings.limit_s,
            "memory_limit_bytes": settings.memory_limit_bytes,
            "args": "" if offline or settings.args is None else base64.b64encode(pickle.dumps(settings.args)).decode(),
            "sys_path": _import_path(),
            "grader": warm_up["grader"],
            "custom": warm_up["custom"],
            "settings": warm_up["settings"],
        }
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await worker.ask(message)
        except BaseException:
            await worker.kill()
            raise
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Sends one request and waits for its reply, without a limit. Raises `GraderDied`."""
        if self.dead:
            raise GraderDied(f"grader process {self.pid} is gone")
        request_id = next(self._ids)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        try:
            data = await asyncio.to_thread(_encode, {"id": request_id, **message})
            assert self._process.stdin is not None, "the worker is started with a stdin pipe"
            async with self._write_lock:
                self._process.stdin.write(HEADER.pack(len(data)) + data)
                await self._process.stdin.drain()
            return await future
        except (BrokenPipeError, ConnectionResetError) as problem:
            raise GraderDied(f"grader process {self.pid} closed its pipe") from problem
        finally:
            self._waiting.pop(request_id, None)

    async def kill(self) -> None:
        """Ends the process and everything it started in its group; returns when it is reaped."""
        self.dead = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        # Before the wait, which lasts until both pipes are closed: an unread one, or one that a child of the grader
        # holds, would not be. What is left open is closed by the garbage collector, perhaps after the event loop.
        transport: asyncio.SubprocessTransport = self._process._transport  # type: ignore[attr-defined]  # no public way
        for pipe in (transport.get_pipe_transport(0), transport.get_pipe_transport(1)):
            if pipe is not None and not pipe.is_closing():
                pipe.abort() if isinstance(pipe, asyncio.WriteTransport) else pipe.close()
        await self._process.wait()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        transport.close()

    async def _read(self) -> None:
        """Resolves waiting requests until the pipe ends or carries nonsense."""
        assert self._process.stdout is not None, "the worker is started with a stdout pipe"
        try:
            while True:
                (length,) = HEADER.unpack(await self._process.stdout.readexactly(HEADER.size))
                if length > MAX_REPLY_BYTES:
                    break
                reply = json.loads(await self._process.stdout.readexactly(length))
                future = self._waiting.get(reply["id"])
                if future is not None and not future.done():
                    future.set_result(reply)
        except (asyncio.IncompleteReadError, ValueError, KeyError, TypeError):
            pass  # end of the process, or a grader that wrote into the pipe: both end this worker
        finally:
            self.dead = True
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(GraderDied(f"grader process {self.pid} died while grading"))


def _encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode()


def _import_path() -> list[str]:
    """Where the worker finds what this process can import, the current directory included."""
    return [os.path.abspath(p) for p in sys.path if p != ""] + [os.getcwd()]
