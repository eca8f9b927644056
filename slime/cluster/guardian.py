"""The guardian of a run kills all processes of the run once the driver is gone, whether the driver returned or was
killed.

The guardian is a small process (`python -m slime.cluster.guardian`, standard library only) in its own session and
without a parent. So a command that kills the driver and all its descendants, such as `ray job stop`, does not kill the
guardian. The driver starts it before Ray and holds the write end of a pipe to it (`Guardian`). `Guardian.tend`, or at
the latest `Guardian.close`, replaces a killed guardian.

The guardian scans the process table every second, so it knows the run's processes even after they rename themselves or
their parents die (`slime.serving.child_process`). It wakes at end-of-file on the pipe, or when a scan finds the
driver's pid gone (a forked child may hold the pipe open). Then it sends SIGTERM and, after a short grace period,
SIGKILL until no process is left. Finally it removes the shared-memory files of these processes and the run's temporary
folders.

On other hosts an actor owns the guardian instead of the driver (`HostGuardian`). Ray kills the actor when the driver is
gone. Each kind of failure is detected as follows:

    killed              who notices                       what follows on this host
    the driver          Ray, which ends its actors        end-of-file on the pipe: the guardian ends the run
    this host's raylet  its workers, also the actor       the same
    Ray's head          the raylets, after their limit    the same
    the actor           the guardian, by its pipe         the same; the driver notices and starts a new actor, which
                                                          waits until that guardian has finished (`GuardedHosts`)
    the guardian        the actor, by the other pipe      a new guardian starts in a tenth of a second; if the actor is
                                                          killed meanwhile, the driver's next check starts both
    the guardian, for   the driver: `wait` returns        a new actor with a new guardian
    the fourth time

Invariants
1. The guardian kills only processes that have this run's id in their environment, and their descendants. It never kills
   the driver or an ancestor of the guardian.
2. It removes only shared-memory files that those processes used and that no living process uses.
3. All processes exit within `GRACE_S + KILL_LIMIT_S` and a second or two, so less than 15 s after the driver.
4. Only SIGKILL stops the guardian early. Ctrl-C and SIGTERM sent to the whole run do not.
5. A host's guardian has only the two pipes of its actor, so end-of-file means that the actor is gone.
6. After `HostGuardian.close`, the host's guardian has exited and no new one starts.
7. No guardian starts on a host while an older guardian is still killing processes there, because it would also kill the
   new processes.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO

import slime
from slime.core.blame import here
from slime.core.errors import DeadlineExceeded, EngineError
from slime.core.processes import RUN_ID_ENV, SHORT_ROOM
from slime.serving.child_process import (
    KEEP_ENVIRON_ENV,
    ProcessFamily,
    ProcessId,
    SharedMemoryFiles,
    ancestors,
    read_stat,
)

GRACE_S = 2.0
"""Time between SIGTERM and SIGKILL. A short time is safe, because checkpoints are committed by renaming."""
KILL_LIMIT_S = 8.0
LOOK_EVERY_S, LOOK_AT_LEAST_EVERY_S = 1.0, 4.0
"""Time between two scans, on an idle and on a busy machine."""
CLOSE_LIMIT_S = 15.0
START_AGAIN_S = 30.0
"""Time between a failed start and the next attempt."""
WATCHING, ENDED = b"watching ", b"ended "
"""Messages of a guardian to its owner. The first adds its pid, the last the number of remaining processes."""
MAX_STARTS = 4
"""Maximum number of guardians that one `HostGuardian` starts."""
OLD_LIMIT_S = 60.0
"""Time limit for a guardian without an owner to finish. It takes ten seconds plus its scans on a busy machine."""
POLL_S = 0.1
_MODULE = "slime.cluster.guardian"
_log = logging.getLogger("slime.guardian")


@dataclass(frozen=True, slots=True)
class Watcher:
    pid: int
    pipe: IO[bytes]
    """Closing this pipe makes the guardian kill the run's processes."""
    words: IO[bytes]
    """The guardian writes its last message (`ENDED`) here. If the guardian was killed, there is only end-of-file."""

    def last_word(self, limit_s: float | None = None) -> int | None:
        """Waits for the last message and returns the number of processes left; None if the guardian was killed.

        Raises `TimeoutError` after `limit_s`.
        """
        if not self._has_said(limit_s):
            raise TimeoutError
        word = self.words.readline()
        return int(word.removeprefix(ENDED)) if word.startswith(ENDED) else None

    @property
    def is_over(self) -> bool:
        return self._has_said(0.0)

    def _has_said(self, limit_s: float | None) -> bool:
        poll = select.poll()  # `select.select` refuses file descriptors above 1,023
        poll.register(self.words, select.POLLIN)
        return bool(poll.poll(None if limit_s is None else 1000 * limit_s))

    def end(self) -> None:
        """Tells the guardian to kill the run's processes. Does not wait."""
        with contextlib.suppress(BrokenPipeError):
            self.pipe.close()


class Guardian:
    """The driver's handle of its guardian."""

    def __init__(self, start: Callable[[], Watcher], log_path: str | Path | None = None) -> None:
        self._start, self._watcher = start, start()
        self._num_left: int | None = None
        self._again_at = 0.0
        self._what = here("the guardian", None if log_path is None else Path(log_path))

    @property
    def pid(self) -> int:
        return self._watcher.pid

    @property
    def alive(self) -> bool:
        return self._num_left is None and not self._watcher.is_over

    def close(self, timeout_s: float = CLOSE_LIMIT_S) -> None:
        """Kills the run's processes and waits until none is left. Can be called several times.

        Raises `EngineError` if processes are left or the guardian does not respond in time.
        """
        if self._num_left is None and (left := self._end(timeout_s)) is None:
            _log.warning("%s; a new guardian kills the run's processes", self._what.ended(None))
            self._watcher = self._start()
            left = self._end(timeout_s)
        else:
            left = self._num_left
        if left is None:
            raise EngineError(
                f"two guardians in a row were lost, so processes of the run may be left (environment variable "
                f"{RUN_ID_ENV}): {self._what.ended(None)}"
            )
        if left:
            raise EngineError(
                f"{self._what} left {left} processes of the run that survived SIGKILL; its log {self._what.log or ''} "
                f"names them, and they have the environment variable {RUN_ID_ENV}"
            )

    def tend(self) -> None:
        """Replaces a killed guardian. Never raises; after a failed start, a later call tries again."""
        if self.alive or time.monotonic() < self._again_at:
            return
        _log.warning("%s; a new guardian starts", self._what.ended(None))
        try:
            self._watcher = self._start()
        except (OSError, EngineError) as error:
            _log.error("the new guardian did not start: %s", error)
            self._again_at = time.monotonic() + START_AGAIN_S

    def _end(self, timeout_s: float) -> int | None:
        """Returns the number of processes left; None if the guardian was killed before it finished."""
        self._watcher.end()
        try:
            self._num_left = self._watcher.last_word(timeout_s)
        except TimeoutError:
            raise EngineError(
                f"{self._what} did not finish within {timeout_s:.0f} s, because a process of the run does not exit; "
                f"look for a process in state D (log of the guardian: {self._what.log})"
            ) from None
        return self._num_left


def start_guardian(run_id: str, *, temp_dirs: Sequence[str] = (), log_path: str | Path | None = None) -> Guardian:
    """Starts the guardian of `run_id`. Call it before any process starts that the guardian may have to kill.

    The guardian removes `temp_dirs` at the end. Sets `SPT_NOENV` in this process's environment, so that the run's
    processes keep their environment, and with it the run's id, when they rename themselves.
    """
    return Guardian(lambda: start_watcher(run_id, temp_dirs, log_path), log_path)


def start_watcher(run_id: str, temp_dirs: Sequence[str], log_path: str | Path | None) -> Watcher:
    """Starts a guardian process and waits until it is watching. Raises `EngineError` if the guardian exits first."""
    assert run_id, "an empty run id would mark every process"
    os.environ[KEEP_ENVIRON_ENV] = "1"
    root = str(Path(slime.__file__).resolve().parent.parent)
    env = {k: v for k, v in os.environ.items() if k != RUN_ID_ENV}
    env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", _MODULE, "--run-id", run_id, "--driver-pid", str(os.getpid())]
    for folder in temp_dirs:
        command += ["--temp-dir", str(folder)]
    if log_path is not None:
        command += ["--log", str(Path(log_path).resolve())]
    starter = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=env,
        start_new_session=True,
        cwd="/",
    )
    assert starter.stdin is not None and starter.stdout is not None, "the guardian was started without pipes"
    greeting = starter.stdout.readline()
    status = starter.wait()
    if not greeting.startswith(WATCHING):
        guardian = here("the guardian", None if log_path is None else Path(log_path))
        raise EngineError(f"{guardian.ended(status)} before it began to watch")
    return Watcher(int(greeting.removeprefix(WATCHING)), starter.stdin, starter.stdout)


def ending_guardians(run_id: str) -> list[int]:
    """Returns the pids of guardians on this host that have lost their owner and are killing the run's processes."""
    found = []
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        with contextlib.suppress(OSError):  # gone, or another user's
            words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
            owner = dict(pairwise(words)).get("--driver-pid", "")
            if _MODULE in words and run_id in words and owner.isdigit() and _driver_id(pid) is not None:
                found += [pid] * (_driver_id(int(owner)) is None)
    return found


def _driver_id(pid: int) -> ProcessId | None:
    stat = read_stat(pid)
    return stat.id if stat is not None and stat.state not in "ZX" else None


def watch(run_id: str, driver_pid: int, pipe_fd: int) -> tuple[ProcessFamily, SharedMemoryFiles, set[str]]:
    """Follows the run's processes until the driver closes the pipe or is gone.

    Returns the processes, their shared memory, and the parent folders of their temporary folders. Daemons of an
    existing Ray cluster may have a different TMPDIR from the driver.
    """
    family = ProcessFamily(RUN_ID_ENV, run_id, spare=ancestors(driver_pid))
    files, seen = SharedMemoryFiles(), set[ProcessId]()
    rooms = {tempfile.gettempdir(), SHORT_ROOM}
    driver = _driver_id(driver_pid)
    while driver is not None and _driver_id(driver_pid) == driver:
        began = time.monotonic()
        members = family.refresh()
        files.observe(members)
        rooms |= {room for member in members if member.id not in seen and (room := _temp_dir_of(member.id.pid))}
        seen |= {member.id for member in members}
        # The pause limits the share of a core that scans use, even with many or large processes. The pause must also be
        # short: if an engine dies before the first scan that sees it, its shared memory is not removed.
        pause = min(max(LOOK_EVERY_S, 50 * (time.monotonic() - began)), LOOK_AT_LEAST_EVERY_S)
        readable, _, _ = select.select([pipe_fd], [], [], pause)
        if readable:
            break
    return family, files, rooms


def _temp_dir_of(pid: int) -> str:
    """Returns TMPDIR in the environment of a process, or an empty string."""
    with contextlib.suppress(OSError):  # gone, or another user's
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"TMPDIR="):
                return os.fsdecode(entry.removeprefix(b"TMPDIR="))
    return ""


def end_run(
    family: ProcessFamily, files: SharedMemoryFiles, temp_dirs: Sequence[str], scratch: Sequence[str] = ()
) -> int:
    """Kills the family and removes its files. Returns the number of processes left (normally 0).

    `scratch` holds glob patterns of folders to remove. They are searched last, when no process can create one any more.
    """
    left = family.end(grace_s=GRACE_S, limit_s=KILL_LIMIT_S, before_kill=files.observe)
    _log.info("removed from shared memory: %s", files.remove_orphans())
    for folder in (*temp_dirs, *(found for pattern in scratch for found in glob.glob(pattern))):
        shutil.rmtree(folder, ignore_errors=True)
    for process in left:
        _log.error("still alive after SIGKILL: pid %d %s in state %s", process.id.pid, process.name, process.state)
    return len(left)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=_MODULE, description="guardian of one run (started by the driver)")
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--driver-pid", type=int, required=True)
    parser.add_argument("--temp-dir", action="append", default=[])
    parser.add_argument("--log")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the guardian. Returns exit status 1 if processes are left."""
    options = _parse(arguments)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(ignored, signal.SIG_IGN)
    if options.log:
        logging.basicConfig(filename=options.log, level=logging.INFO, format="%(asctime)s %(message)s")
    if os.fork():
        os._exit(0)
    os.setsid()
    os.write(1, WATCHING + b"%d\n" % os.getpid())  # `start_watcher` reads it
    family, files, rooms = watch(options.run_id, options.driver_pid, sys.stdin.fileno())
    _log.info("run %s is over; killing its remaining processes", options.run_id)
    scratch = [os.path.join(glob.escape(room), f"slime-{glob.escape(options.run_id)}-*") for room in sorted(rooms)]
    num_left = end_run(family, files, options.temp_dir, scratch)
    with contextlib.suppress(BrokenPipeError):  # the owner is gone
        os.write(1, ENDED + b"%d\n" % num_left)
    return 1 if num_left else 0


class HostGuardian:
    """Keeps a guardian running on this host. A thread waits for its exit, and replaces a killed guardian."""

    def __init__(self, run_id: str, *, log_path: Path) -> None:
        """Starts the first guardian, after older guardians of the run have exited.

        Raises `EngineError` if it does not start, `DeadlineExceeded` if an older guardian does not exit.
        """
        _wait_for_old(run_id)
        self._run_id, self._log_path = run_id, log_path
        self._lock, self._closing, self._over = threading.Lock(), False, threading.Event()
        self._num_left: int | None = None
        self._watcher = self._start()
        self._thread = threading.Thread(target=self._listen, name="guardian", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits until the guardian has exited and no new one will start."""
        self._over.wait()

    def close(self, limit_s: float = CLOSE_LIMIT_S) -> None:
        """Kills the run's processes on this host, except this one, and waits until none is left.

        Raises `EngineError` if processes are left, `DeadlineExceeded` if the guardian does not respond.
        """
        with self._lock:  # `_listen` holds it while replacing a guardian
            self._closing = True
            self._watcher.end()
        if not self._over.wait(limit_s):
            raise DeadlineExceeded.waiting(
                owner="a host's actor", for_what=f"{here('the guardian')} (log: {self._log_path})", limit_s=limit_s
            )
        if self._num_left != 0:
            guardian = here("the guardian", self._log_path)
            if self._num_left is None:
                raise EngineError(f"{guardian.ended(None)}, so processes of the run may be left there")
            raise EngineError(f"{guardian} left {self._num_left} processes; its log {self._log_path} names them")

    def _start(self) -> Watcher:
        return start_watcher(self._run_id, [], self._log_path)

    def _listen(self) -> None:
        for start in range(1, MAX_STARTS + 1):
            self._num_left = self._watcher.last_word()
            with self._lock:
                if self._num_left is not None or self._closing or start == MAX_STARTS:
                    break
                _log.warning("the guardian of this host was killed; a new guardian starts")
                try:
                    self._watcher = self._start()
                except (OSError, EngineError):
                    _log.exception("the new guardian did not start")
                    break
        self._over.set()


def _wait_for_old(run_id: str) -> None:
    """Waits until all guardians of the run on this host that have lost their owner have exited."""
    deadline = time.monotonic() + OLD_LIMIT_S
    while old := ending_guardians(run_id):
        if time.monotonic() > deadline:
            raise DeadlineExceeded.waiting(
                owner="a host's actor",
                for_what=f"an older {here('guardian')} to exit",
                limit_s=OLD_LIMIT_S,
                last_progress=f"process {old[0]} still runs",
            )
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main())
