"""The guardian of a run kills all of the run's processes when the driver exits or is killed.

The guardian is a small process (`python -m slime.cluster.guardian`, standard library only). It is daemonized into its
own session, so a command that kills the driver and all its descendants, such as `ray job stop`, does not affect it. The
driver starts it before Ray and keeps the write end of a pipe to it (`Guardian`). If the guardian is killed,
`Guardian.tend` or, failing that, `Guardian.close` starts a new one.

The guardian scans the process table every second, so it can identify the run's processes even after they rename
themselves or lose their parents (`slime.serving.child_process`). It acts on end-of-file on the pipe, or when a scan
finds the driver's pid gone (a forked child may still hold the pipe open). It sends SIGTERM and, after a short grace
period, SIGKILL until no process is left. Finally, it removes the processes' shared-memory files and the run's temporary
folders.

On other hosts, an actor owns the guardian instead of the driver (`HostGuardian`). Ray kills the actor when the driver
is gone. Failures are handled as follows:

    what died           detected by                       consequence on this host
    the driver          Ray, which kills its actors       end-of-file on the pipe: the guardian kills the processes
    this host's raylet  its workers, including the actor  same
    Ray's head          the raylets, after a timeout      same
    the actor           the guardian, through its pipe    same; the driver notices and starts a new actor, which waits
                                                          until the old guardian has finished (`GuardedHosts`)
    the guardian        the actor, through its own pipe   a new guardian starts within a tenth of a second; if the actor
                                                          is killed first, the driver's next check restarts both
    the guardian, for   the driver: `wait` returns        a new actor with a new guardian
    the fourth time

Invariants
1. The guardian only kills processes with this run's id in their environment and their descendants, but never the driver
   or the driver's ancestors.
2. It only removes shared-memory files that these processes used and that no live process uses.
3. All processes exit within `GRACE_S + KILL_LIMIT_S` plus a second or two, that is, less than 15 s after the driver.
4. Only SIGKILL stops the guardian early. It ignores Ctrl-C, SIGTERM and SIGUSR1 sent to the whole run.
5. A host's guardian only has the two pipes of its actor, so end-of-file means that the actor is gone.
6. After `HostGuardian.close`, the host's guardian has exited and no new one starts.
7. No guardian starts on a host while an older one is still killing processes there, because the older one would also
   kill the new processes.
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
"""Time between SIGTERM and SIGKILL. It can be short, because checkpoints are committed atomically by a rename."""
KILL_LIMIT_S = 8.0
LOOK_EVERY_S, LOOK_AT_LEAST_EVERY_S = 1.0, 4.0
"""Minimum and maximum interval between scans. Scans are less frequent on a busy machine."""
CLOSE_LIMIT_S = 15.0
START_AGAIN_S = 30.0
"""Time between a failed start and the next attempt."""
WATCHING, ENDED = b"watching ", b"ended "
"""A guardian's first message to its owner, followed by its pid, and its last one, followed by the processes left."""
MAX_STARTS = 4
"""Maximum number of guardians that one `HostGuardian` starts."""
OLD_LIMIT_S = 60.0
"""Timeout for an orphaned guardian to finish. It takes ten seconds, plus the time for scans on a busy machine."""
POLL_S = 0.1
_MODULE = "slime.cluster.guardian"
_log = logging.getLogger("slime.guardian")


@dataclass(frozen=True, slots=True)
class Watcher:
    pid: int
    pipe: IO[bytes]
    """Closing this pipe makes the guardian kill the run's processes."""
    words: IO[bytes]
    """The guardian's output, with `ENDED` as last message. If the guardian is killed, it ends without this message."""

    def last_word(self, limit_s: float | None = None) -> int | None:
        """Waits for the last message. Returns the number of processes left, or None if the guardian was killed.

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
        poll = select.poll()  # `select.select` does not support file descriptors above 1,023
        poll.register(self.words, select.POLLIN)
        return bool(poll.poll(None if limit_s is None else 1000 * limit_s))

    def end(self) -> None:
        """Tells the guardian to kill the run's processes. Does not block."""
        with contextlib.suppress(BrokenPipeError):
            self.pipe.close()


class Guardian:
    """The driver's handle for its guardian."""

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
        """Kills the run's processes and waits until none is left. Idempotent.

        Raises `EngineError` if processes are left or the guardian does not respond in time.
        """
        if self._num_left is None and (left := self._end(timeout_s)) is None:
            _log.warning("%s; starting a new one to kill the run's processes", self._what.ended(None))
            self._watcher = self._start()
            left = self._end(timeout_s)
        else:
            left = self._num_left
        if left is None:
            raise EngineError(
                f"two guardians in a row died, so processes of the run may still be running (environment variable "
                f"{RUN_ID_ENV}): {self._what.ended(None)}"
            )
        if left:
            raise EngineError(
                f"{left} processes of the run survived SIGKILL by {self._what}; its log {self._what.log or ''} lists "
                f"them, and they have the environment variable {RUN_ID_ENV}"
            )

    def tend(self) -> None:
        """Replaces a killed guardian. Never raises: if the new one does not start, a later call retries."""
        if self.alive or time.monotonic() < self._again_at:
            return
        _log.warning("%s; starting a new one", self._what.ended(None))
        try:
            self._watcher = self._start()
        except (OSError, EngineError) as error:
            _log.error("the new guardian did not start: %s", error)
            self._again_at = time.monotonic() + START_AGAIN_S

    def _end(self, timeout_s: float) -> int | None:
        """Returns the number of processes left, or None if the guardian was killed before it finished."""
        self._watcher.end()
        try:
            self._num_left = self._watcher.last_word(timeout_s)
        except TimeoutError:
            raise EngineError(
                f"{self._what} did not finish within {timeout_s:.0f} s, because a process of the run does not exit; "
                f"look for processes in state D (guardian log: {self._what.log})"
            ) from None
        return self._num_left


def start_guardian(run_id: str, *, temp_dirs: Sequence[str] = (), log_path: str | Path | None = None) -> Guardian:
    """Starts the guardian of `run_id`. Call this before starting any process that the guardian may have to kill.

    At the end, the guardian removes `temp_dirs`. Sets `SPT_NOENV` in this process's environment, so that the run's
    processes keep their environment, including the run id, when they rename themselves.
    """
    return Guardian(lambda: start_watcher(run_id, temp_dirs, log_path), log_path)


def start_watcher(run_id: str, temp_dirs: Sequence[str], log_path: str | Path | None) -> Watcher:
    """Starts a guardian process and waits until it is ready. Raises `EngineError` if it exits first."""
    assert run_id, "an empty run id would match every process"
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
        raise EngineError(f"{guardian.ended(status)} before it was ready")
    return Watcher(int(greeting.removeprefix(WATCHING)), starter.stdin, starter.stdout)


def ending_guardians(run_id: str) -> list[int]:
    """Returns the pids of this host's orphaned guardians, which are killing the run's processes."""
    found = []
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        with contextlib.suppress(OSError):  # the process is gone or belongs to another user
            words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
            owner = dict(pairwise(words)).get("--driver-pid", "")
            if _MODULE in words and run_id in words and owner.isdigit() and _driver_id(pid) is not None:
                found += [pid] * (_driver_id(int(owner)) is None)
    return found


def _driver_id(pid: int) -> ProcessId | None:
    stat = read_stat(pid)
    return stat.id if stat is not None and stat.state not in "ZX" else None


def watch(run_id: str, driver_pid: int, pipe_fd: int) -> tuple[ProcessFamily, SharedMemoryFiles, set[str]]:
    """Tracks the run's processes until the driver closes the pipe or is gone.

    Returns the processes, their shared-memory files, and all values of TMPDIR among them: the daemons of an existing
    Ray cluster may use a different TMPDIR from the driver's.
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
        # The pause limits the CPU time spent on scans, even with many or large processes. But it must be short, too: if
        # an engine dies before its first scan, its shared memory is never removed.
        pause = min(max(LOOK_EVERY_S, 50 * (time.monotonic() - began)), LOOK_AT_LEAST_EVERY_S)
        readable, _, _ = select.select([pipe_fd], [], [], pause)
        if readable:
            break
    return family, files, rooms


def _temp_dir_of(pid: int) -> str:
    """Returns a process's TMPDIR, or an empty string."""
    with contextlib.suppress(OSError):  # the process is gone or belongs to another user
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"TMPDIR="):
                return os.fsdecode(entry.removeprefix(b"TMPDIR="))
    return ""


def end_run(
    family: ProcessFamily, files: SharedMemoryFiles, temp_dirs: Sequence[str], scratch: Sequence[str] = ()
) -> int:
    """Kills the processes and removes their files. Returns the number of processes left (normally 0).

    `scratch`: glob patterns of folders to remove. They are expanded last, when no process can create new ones.
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
    """Runs the guardian. Returns 1 if processes are left, else 0."""
    options = _parse(arguments)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGUSR1):
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
    """Keeps a guardian running on this host. A thread waits for it to exit and replaces it if it was killed."""

    def __init__(self, run_id: str, *, log_path: Path) -> None:
        """Starts the first guardian after older guardians of the run have exited.

        Raises `EngineError` if it does not start, or `DeadlineExceeded` if an older guardian does not exit.
        """
        _wait_for_old(run_id)
        self._run_id, self._log_path = run_id, log_path
        self._lock, self._closing, self._over = threading.Lock(), False, threading.Event()
        self._num_left: int | None = None
        self._watcher = self._start()
        self._thread = threading.Thread(target=self._listen, name="guardian", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits until the guardian has exited and will not be replaced."""
        self._over.wait()

    def close(self, limit_s: float = CLOSE_LIMIT_S) -> None:
        """Kills the run's processes on this host, except this one, and waits until none is left.

        Raises `EngineError` if processes are left, or `DeadlineExceeded` if the guardian does not respond.
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
                raise EngineError(f"{guardian.ended(None)}, so processes of the run may still be running there")
            raise EngineError(f"{guardian} could not kill {self._num_left} processes; see its log {self._log_path}")

    def _start(self) -> Watcher:
        return start_watcher(self._run_id, [], self._log_path)

    def _listen(self) -> None:
        for start in range(1, MAX_STARTS + 1):
            self._num_left = self._watcher.last_word()
            with self._lock:
                if self._num_left is not None or self._closing or start == MAX_STARTS:
                    break
                _log.warning("the guardian of this host was killed; starting a new one")
                try:
                    self._watcher = self._start()
                except (OSError, EngineError):
                    _log.exception("the new guardian did not start")
                    break
        self._over.set()


def _wait_for_old(run_id: str) -> None:
    """Waits until all orphaned guardians of the run on this host have exited."""
    deadline = time.monotonic() + OLD_LIMIT_S
    while old := ending_guardians(run_id):
        if time.monotonic() > deadline:
            raise DeadlineExceeded.waiting(
                owner="a host's actor",
                for_what=f"an older {here('guardian')} to exit",
                limit_s=OLD_LIMIT_S,
                last_progress=f"process {old[0]} is still running",
            )
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main())
