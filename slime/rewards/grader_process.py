"""The parent side of a grader process: starts it, sends requests, kills it.

Consumes: requests from the pool (`ask`), as JSON with columns (`encoded`). Produces: the replies of the process. Waits
for: a thread that encodes the request; the frame that signals the start of work (`TAKE_LIMIT_S`); and the reply, within
the time limit in that frame. Woken by: timers and the reader task, which resolves the futures of a request, or fails
all futures when the process exits. All methods run on one event loop.

Invariants
1. After `kill`, the process is reaped and both pipes are closed, even if there is unread data or other processes hold
   the pipes open.
2. The time limit starts when the grader starts; queueing, encoding and the pipe do not count. A compute-only grader is
   limited in CPU time, which does not depend on the load of the machine, and to `WALL_FACTOR` times as much wall-clock
   time.
3. A failure is blamed on the answer only if the grader was processing it and either ran out of CPU time or died from a
   signal caused by its own computation.
4. Requests are encoded in threads of the pool, so users' threads cannot delay them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import logging
import os
import pickle
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from slime.core.blame import here, how_it_ended
from slime.core.columns import Column
from slime.core.errors import SlimeError
from slime.core.liveness import Silence, processor_s, within
from slime.rewards.grader_confinement import grader_environment
from slime.rewards.grader_worker import HEADER, ONLINE

logger = logging.getLogger(__name__)

MAX_REPLY_BYTES = 2**26
TAKE_LIMIT_S = 60.0
"""Time limit for starting and configuring the process, and for starting on a request. Grading has its own limit."""
MAX_LIMIT_S = 7 * 86400.0
"""Maximum time limit that a grader can request."""
WALL_FACTOR = 5.0
"""Wall-clock limit as a multiple of the CPU time limit. Generous, because machines can be busy."""
MIN_WAIT_S = 0.02
"""Minimum interval for polling the CPU time."""
OWN_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL})
"""Signals caused by a process's own computation, for example when a library runs out of stack or memory."""


class GraderDied(SlimeError, RuntimeError):
    """The grader process died before it replied."""

    looked = False
    """Whether the grader was processing the answer."""
    by_itself = False
    """Whether the process exited without being killed by this side."""


class GradingTimeout(SlimeError, TimeoutError):
    """The grader exceeded its time limit."""

    def __init__(self, reason: str, *, by_answer: bool = False) -> None:
        super().__init__(reason)
        self.by_answer = by_answer
        """Whether the grader spent the time on the answer."""


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """Settings shared by all grader processes."""

    limit_s: float
    """`--reward-timeout-s`."""
    memory_limit_bytes: int | None
    """Maximum size of the address space; None for no limit."""
    args: object
    """The settings for users' functions. Must be picklable."""
    threads: ThreadPoolExecutor
    """Threads for encoding requests."""


@dataclass(slots=True)
class _Waiting:
    taken: asyncio.Future[float]
    """Resolves to the time limit in seconds when grading starts."""
    reply: asyncio.Future[dict[str, Any]]
    since_s: float = 0.0
    """CPU time of the process when it started on the request; later, when the grader started on the answer."""
    looks: bool = False
    """Whether the grader is processing the answer."""

    def fail(self, death: GraderDied) -> None:
        for future in (self.taken, self.reply):
            if not future.done():
                future.set_exception(death)
                future.exception()  # marks it as retrieved: only one of the two is awaited


class GraderProcess:
    """A running worker process. Create it with `start`."""

    def __init__(self, process: asyncio.subprocess.Process, threads: ThreadPoolExecutor) -> None:
        self._process, self._threads = process, threads
        self._ids = itertools.count()
        self._waiting: dict[int, _Waiting] = {}
        self._reader = asyncio.create_task(self._read(), name=f"grader-{process.pid}-reader")
        self._printed = asyncio.create_task(_log_printed(process), name=f"grader-{process.pid}-printed")
        self._write_lock = asyncio.Lock()
        self.dead = False
        self.missing: tuple[str, ...] = ()
        """Parts of the confinement that this machine lacks."""
        self.num_reserved = 0
        """Number of requests assigned to this process, maintained by the pool."""

    @classmethod
    async def start(cls, settings: ProcessSettings, *, warm_up: dict[str, Any], kind: str) -> GraderProcess:
        """Starts a worker in its own process group. Returns when the grader of `warm_up` is loaded.

        `kind`: `ONLINE`, `OFFLINE` or `HELD` of `grader_worker`. `warm_up`: a request, plus the other graders that a
        `held` process must load (`others`).
        """
        offline = kind != ONLINE
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "slime.rewards.grader_worker",
            str(os.getpid()),
            kind,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={
                **grader_environment(os.environ, offline=offline),
                "PYTHONPATH": os.pathsep.join(_import_path()),
            },
        )
        worker = cls(process, settings.threads)
        message = {
            "limit_s": settings.limit_s,
            "memory_limit_bytes": settings.memory_limit_bytes,
            "args": "" if offline or settings.args is None else base64.b64encode(pickle.dumps(settings.args)).decode(),
            "sys_path": _import_path(),
            **{name: warm_up[name] for name in ("grader", "custom", "settings", "others")},
        }
        try:
            worker.missing = tuple((await worker.ask(message)).get("missing", ()))
        except BaseException:
            await worker.kill()
            raise
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, message: dict[str, Any], *, grace_s: float = 0.0, computes: bool = False) -> dict[str, Any]:
        """Sends a request and waits for the reply. Raises `GraderDied` or `GradingTimeout`.

        `grace_s`: extra time, for graders that enforce the limit themselves. `computes`: the limit is in CPU time.
        """
        if self.dead:
            raise GraderDied(self._ended("is gone"))
        loop = asyncio.get_running_loop()
        request_id, waiting = next(self._ids), _Waiting(loop.create_future(), loop.create_future())
        self._waiting[request_id] = waiting
        try:
            data = await loop.run_in_executor(self._threads, encoded, {"id": request_id, **message})
            limit_s = await self._send(data, waiting.taken)
        except (BrokenPipeError, ConnectionResetError) as problem:
            self._waiting.pop(request_id, None)
            raise GraderDied(self._ended("closed its pipe")) from problem
        except BaseException:
            self._waiting.pop(request_id, None)
            raise
        try:
            if computes:
                return await self._computed(waiting, limit_s)
            async with asyncio.timeout(limit_s + grace_s):
                return await waiting.reply
        except GradingTimeout:
            raise
        except TimeoutError:
            raise GradingTimeout(f"timeout after {limit_s:g} s") from None
        finally:
            self._waiting.pop(request_id, None)

    async def _computed(self, waiting: _Waiting, limit_s: float) -> dict[str, Any]:
        """Waits for the reply from a compute-only grader. Raises the same errors as `ask`."""
        end = time.monotonic() + WALL_FACTOR * limit_s
        while True:
            used_s, left_s = self._processor_s() - waiting.since_s, end - time.monotonic()
            await asyncio.wait([waiting.reply], timeout=max(MIN_WAIT_S, min(limit_s - used_s, left_s)))
            if waiting.reply.done():
                return waiting.reply.result()
            used_s = self._processor_s() - waiting.since_s
            if used_s >= limit_s:
                raise GradingTimeout(f"timeout after {limit_s:g} s of CPU time", by_answer=waiting.looks)
            if time.monotonic() >= end:
                wall_s = WALL_FACTOR * limit_s
                raise GradingTimeout(f"timeout after {wall_s:g} s ({used_s:.1f} s of CPU time)")

    def _processor_s(self) -> float:
        return processor_s([self.pid])

    @property
    def end(self) -> str:
        """How the process exited. Valid after `kill`."""
        return how_it_ended(self._process.returncode)

    def _ended(self, how: str) -> str:
        return f"{here('a grader process')} {how}"

    @property
    def crashed(self) -> bool:
        """Whether the process crashed in its own computation. Valid after `kill`."""
        return -(self._process.returncode or 0) in OWN_CRASHES

    async def _send(self, data: bytes, taken: asyncio.Future[float]) -> float:
        """Sends a request and waits until the grader starts. Returns its time limit. Raises `GraderDied`."""
        silence = Silence(self._processor_s)
        try:
            return await within(self._taken(data, taken), TAKE_LIMIT_S, silence)
        except TimeoutError:
            raise GraderDied(self._ended(f"accepted no request within {silence.lasts_s:.0f} s")) from None

    async def _taken(self, data: bytes, taken: asyncio.Future[float]) -> float:
        assert self._process.stdin is not None, "the worker is started with a stdin pipe"
        async with self._write_lock:
            self._process.stdin.write(data)
            await self._process.stdin.drain()
        return await taken

    async def kill(self) -> None:
        """Kills the process group. Returns when the process is reaped."""
        self.dead = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # `Process.kill` would lose the exit status
        # `wait` returns only after all pipes are closed. A pipe with unread data, or one held by a child process,
        # would stay open until it is garbage-collected, possibly after the event loop has closed.
        transport: asyncio.SubprocessTransport = self._process._transport  # type: ignore[attr-defined]  # no public way
        for pipe in map(transport.get_pipe_transport, (0, 1, 2)):
            if pipe is not None and not pipe.is_closing():
                pipe.abort() if isinstance(pipe, asyncio.WriteTransport) else pipe.close()
        await self._process.wait()
        for task in (self._reader, self._printed):
            task.cancel()
        await asyncio.gather(self._reader, self._printed, return_exceptions=True)
        transport.close()

    async def _read(self) -> None:
        """Reads replies and resolves the waiting requests, until EOF or an invalid reply."""
        assert self._process.stdout is not None, "the worker is started with a stdout pipe"
        try:
            while True:
                (length,) = HEADER.unpack(await self._process.stdout.readexactly(HEADER.size))
                if length > MAX_REPLY_BYTES:
                    break
                reply = json.loads(await self._process.stdout.readexactly(length))
                waiting = self._waiting.get(reply["id"])
                if waiting is None:
                    continue
                if "looks_since_s" in reply:
                    waiting.looks, waiting.since_s = True, float(reply["looks_since_s"])
                    continue
                limit_s = float(reply.get("limit_s", 0.0))
                if not 0.0 <= limit_s <= MAX_LIMIT_S:
                    break
                if not waiting.taken.done():
                    waiting.since_s = float(reply.get("used_s", 0.0))
                    waiting.taken.set_result(limit_s)
                if "limit_s" not in reply and not waiting.reply.done():
                    waiting.reply.set_result(reply)
        except (asyncio.IncompleteReadError, ValueError, KeyError, TypeError, AttributeError):
            pass  # the process exited or a grader wrote to the pipe; either way, this worker is done
        finally:
            self.dead = True
            for waiting in self._waiting.values():
                death = GraderDied(self._ended("died while grading"))
                death.looked, death.by_itself = waiting.looks, True
                waiting.fail(death)


def encoded(message: dict[str, Any]) -> bytes:
    """Returns a frame: the length of the JSON, the JSON, and the columns of its samples as they are in memory.

    Per-token numbers make up nearly all of a sample. As JSON, they would hold the GIL for about a microsecond per token
    here, and as long in the process, whether or not the grader reads them.
    """
    samples, parts, columns = list[dict[str, Any]](), list[bytes](), list[tuple[int, str, str, int, int | None]]()
    for number, sample in enumerate(message.get("samples", ())):
        samples.append({name: None if isinstance(value, Column) else value for name, value in sample.items()})
        for name, value in sample.items():
            if isinstance(value, Column):
                counts = None if value.counts is None else len(value.counts)
                columns.append((number, name, value.values.dtype.str, len(value.values), counts))
                parts += [value.values.tobytes(), b"" if value.counts is None else value.counts.tobytes()]
    text = json.dumps({**message, "samples": samples, "columns": columns} if samples else message).encode()
    return b"".join((HEADER.pack(len(text)), text, *parts))


def _import_path() -> list[str]:
    """Returns the import paths and current directory of this process, for the worker."""
    return [os.path.abspath(p) for p in sys.path if p != ""] + [os.getcwd()]


MOST_PRINTED_BYTES = 2**20
"""How much of what a process prints is logged."""


async def _log_printed(process: asyncio.subprocess.Process) -> None:
    """Logs the lines that graders print, until their process ends. Reads on beyond the limit, so that prints never
    block.
    """
    assert process.stderr is not None, "the worker is started with a stderr pipe"
    rest, num_bytes = b"", 0
    while chunk := await process.stderr.read(2**16):
        before, num_bytes = num_bytes, num_bytes + len(chunk)
        if before >= MOST_PRINTED_BYTES:
            continue
        *lines, rest = (rest + chunk).splitlines(keepends=True)
        if rest.endswith(b"\n"):
            lines, rest = [*lines, rest], b""
        for line in filter(bytes.strip, lines):
            logger.info("%s", line.decode(errors="replace").rstrip())
        if num_bytes >= MOST_PRINTED_BYTES:
            logger.warning("grader process %d printed %d bytes; the rest is not logged", process.pid, num_bytes)
    if rest.strip():
        logger.info("%s", rest.decode(errors="replace"))
