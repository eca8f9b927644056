"""Ranks of a gloo world in processes of their own, which run named functions together and are kept for the next one.

The one place in which tests start ranks. `Ranks.run` gives a function (by its import path, since it travels by pickle)
to as many processes as it needs and returns what each of them returned. Importing costs more than most of the work, so
the processes are forked off a server that has imported the trainer once, and live as long as the test session.

Consumes: functions and their arguments, from the test. Produces: their results, by rank. Waits for: the answers of all
ranks, up to a limit. Is woken by: an answer, or the end of a process.

Invariants
1. Between two functions no process group is left, and no rank has died: a failure ends all processes, and the next
   function gets new ones.
2. Every wait has a limit; what a rank raised, and the end of its output, is in the error.
3. The processes end with the test session, whatever happens to it.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PRELOADED = ("tests.support.training_ranks",)
"""Imports the trainer."""
LIMIT_S = 560.0
"""Of one function, on a busy machine."""
OTHERS_S = 3.0
"""After a failure: for the other ranks to say what happened to them."""
LOOPBACK = "127.0.0.1"


class RankError(AssertionError):
    """A rank raised, died or had no answer in time."""


@dataclass(frozen=True)
class Seat:
    """One rank's place in the world of one function."""

    rank: int
    world_size: int
    port: int
    """Where rank 0 listens, on loopback."""
    listener: socket.socket | None
    """Of rank 0: a port chosen beforehand could be taken meanwhile."""

    @property
    def place(self) -> dict[str, Any]:
        """Where a `MegatronBackend` stands: it makes the process groups itself."""
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "local_rank": self.rank,  # counts on a GPU only
            "master_address": LOOPBACK,
            "master_port": self.port,
            "listener": self.listener,
        }

    @contextlib.contextmanager
    def world(self) -> Iterator[Any]:
        """The process group of all ranks, in the block."""
        from datetime import timedelta

        import torch.distributed as dist

        from slime.weights.rendezvous import join_store, keep_gloo_on, open_store

        limit = timedelta(seconds=120)
        keep_gloo_on(LOOPBACK)
        if self.listener is not None:
            store = open_store(self.listener, world_size=self.world_size, timeout=limit)
        else:
            store = join_store(LOOPBACK, self.port, world_size=self.world_size, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=limit)
        try:
            yield dist.group.WORLD
        finally:
            dist.destroy_process_group()


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    connection: Connection
    log: Path


class Ranks:
    """Processes that wait for functions. Use as a context manager, or call `close`."""

    def __init__(self, *, fresh: bool = False) -> None:
        """`fresh`: processes that have imported and initialised nothing (SGLang and CUDA want that)."""
        self._context: Any = multiprocessing.get_context("spawn" if fresh else "forkserver")
        if not fresh:
            self._context.set_forkserver_preload(list(PRELOADED))
        self._workers: list[_Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="slime-ranks-")

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, limit_s: float = LIMIT_S) -> list[Any]:
        """`function(seat, *args)` on ranks 0 to `world_size` - 1; what they returned, by rank.

        Raises `RankError`, and ends the processes, if one raises or has no answer within `limit_s`: the others may wait
        for it in a collective.
        """
        deadline = time.monotonic() + limit_s
        self._start(world_size)
        workers = self._workers[:world_size]
        try:
            workers[0].connection.send_bytes(b"")  # asks for a port
            port = int(pickle.loads(self._answers(workers[:1], deadline)[0]))
            for worker in workers:
                worker.connection.send_bytes(pickle.dumps((function, world_size, port, args)))
            return [pickle.loads(answer) for answer in self._answers(workers, deadline)]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the processes; `run` would start others."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()
        self._workers.clear()

    def _start(self, number: int) -> None:
        """Brings up as many processes, on one thread each."""
        with _environment({"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}):
            for rank in range(len(self._workers), number):
                ours, theirs = multiprocessing.Pipe()
                log = Path(self._folder.name) / f"rank_{rank}.log"
                process = self._context.Process(target=_serve, args=(rank, theirs, log), daemon=True)
                process.start()
                theirs.close()
                self._workers.append(_Worker(process, ours, log))

    def _answers(self, workers: list[_Worker], deadline: float) -> list[bytes]:
        """One answer of each, by rank."""
        answers: dict[int, bytes] = {}
        problems: list[str] = []
        while len(answers) < len(workers):
            waiting = {w.connection: rank for rank, w in enumerate(workers) if rank not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                problems = problems or [f"got no answer of ranks {sorted(waiting.values())} in time"]
                break
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                answers[rank], problem = self._answer(workers[rank], rank)
                if problem and not problems:  # others may have been first, and this one may only have missed them
                    deadline = min(deadline, time.monotonic() + OTHERS_S)
                problems += [problem] if problem else []
        if problems:
            logs = "\n".join(w.log.read_text(errors="replace")[-3000:] for w in workers if w.log.exists())
            raise RankError("\n".join([*problems, logs]))
        return [answers[rank] for rank in range(len(workers))]

    def _answer(self, worker: _Worker, rank: int) -> tuple[bytes, str]:
        """(what it returned, what is wrong with it)"""
        try:
            good, answer = worker.connection.recv_bytes().split(b"\n", 1)
        except (EOFError, ConnectionError):
            return b"", f"rank {rank} died"
        return answer, "" if good == b"ok" else f"rank {rank} raised\n{answer.decode()}"


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """Variables that processes started in the block inherit."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(rank: int, connection: Connection, log: Path) -> None:
    """The life of one process: functions one after the other, until the test session closes the pipe."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import torch

    torch.set_num_threads(1)
    listener: socket.socket | None = None
    while True:
        try:
            asked = connection.recv_bytes()
        except EOFError:
            return
        try:
            if not asked:
                listener = socket.create_server((LOOPBACK, 0))
                answer = pickle.dumps(listener.getsockname()[1])
            else:
                function, world_size, port, args = pickle.loads(asked)
                seat = Seat(rank, world_size, port, listener)
                listener = None
                answer = pickle.dumps(function(seat, *args))
                del seat
                gc.collect()  # threads of its groups end with it
        except BaseException:
            connection.send_bytes(b"error\n" + traceback.format_exc().encode())
            return
        connection.send_bytes(b"ok\n" + answer)
