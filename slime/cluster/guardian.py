"""The guardian of a run: when the driver is gone, for whatever reason, so is everything that the run started.

A small process (`python -m slime.cluster.guardian`, standard library only) in a session of its own. The driver starts
it before Ray and holds the write end of a pipe to it (`Guardian`). One that was killed is replaced as soon as the
driver looks (`Guardian.tend`), at the latest at the end.

On other hosts of a run the owner of the guardian is an actor there, in the driver's place (`host_guardian`).

Consumes the process table: it looks every second, so that it knows the run's processes even after they rename
themselves or lose their parents (`slime.serving.proctree`). Produces an empty run: SIGTERM to all, a short grace,
SIGKILL until none is left; shared-memory files of those processes are removed, and the run's temporary folders. Waits
for the driver's end. Is woken by whichever comes first: end-of-file on the pipe, or a look that finds the driver's pid
gone (a forked child may hold the pipe open). Nobody else hears from it but by its exit status and its log.

Invariants
1. Only processes that carry this run's id in their environment, or descend from one that does, are touched; never the
   driver, never an ancestor of the guardian.
2. Only shared-memory files that those processes used and nobody uses any more are removed.
3. Done within `GRACE_S + KILL_LIMIT_S` and a second or two: less than 15 s after the driver's end.
4. No signal but SIGKILL ends the guardian early: Ctrl-C and SIGTERM sent to the whole run must not.
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
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import slime
from slime.core.errors import EngineError
from slime.core.ids import RUN_ID_ENV
from slime.serving.proctree import KEEP_ENVIRON_ENV, ProcessFamily, ProcessId, read_stat
from slime.serving.shm import SharedMemoryFiles

GRACE_S = 2.0
"""Between SIGTERM and SIGKILL. Nothing of value is written at that time: checkpoints are committed by renaming."""
KILL_LIMIT_S = 8.0
LOOK_EVERY_S, LOOK_AT_LEAST_EVERY_S = 1.0, 4.0
"""Between two looks on an idle machine, and on a busy one."""
_CLOSE_LIMIT_S = 15.0
START_AGAIN_S = 30.0
"""After one that did not start."""
WATCHING, ENDED = b"watching\n", b"ended "
"""What a guardian says when it watches; and, detached, before the number of processes that are left."""
_MODULE = "slime.cluster.guardian"
_log = logging.getLogger("slime.guardian")


class Guardian:
    """The driver's handle of its guardian."""

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        """`start` returns a guardian that watches."""
        self._start, self._process = start, start()
        self._again_at = 0.0

    @property
    def pid(self) -> int:
        """Pid of the guardian."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the guardian watches."""
        return self._process.poll() is None

    def close(self, timeout_s: float = _CLOSE_LIMIT_S) -> None:
        """Ends the run's processes now and waits until none is left. May be called again.

        Raises `EngineError` if some are left or the guardian does not answer in time.
        """
        status = self._end(timeout_s)
        if status < 0:
            _log.warning("the guardian (pid %d) was killed by signal %d; another one ends the run", self.pid, -status)
            self._process = self._start()
            status = self._end(timeout_s)
        if status < 0:
            raise EngineError(
                f"the guardian was killed by signal {-status}, and so was the one before it: nobody has looked what is "
                f"left of the run; environment variable {RUN_ID_ENV} marks its processes"
            )
        if status != 0:
            raise EngineError(
                f"the guardian ended with status {status}: processes of the run are left; its log names them "
                f"(environment variable {RUN_ID_ENV} marks them)"
            )

    def tend(self) -> None:
        """Starts another one if this one was killed. Never raises; tries again later if none starts."""
        if self.alive or time.monotonic() < self._again_at:
            return
        _log.warning("the guardian (pid %d) ended with status %s; another one starts", self.pid, self._process.poll())
        try:
            self._process = self._start()
        except (OSError, EngineError) as error:
            _log.error("no other guardian started: %s", error)
            self._again_at = time.monotonic() + START_AGAIN_S

    def _end(self, timeout_s: float) -> int:
        """Has the guardian do its work; its exit status, negative if a signal ended it before."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise EngineError(
                f"the guardian (pid {self._process.pid}) did not finish in {timeout_s:.0f} s, because a process of the "
                "run does not die; look for processes in state D"
            ) from None


def start_guardian(run_id: str, *, temp_dirs: Sequence[str] = (), log_path: str | Path | None = None) -> Guardian:
    """Starts the guardian of `run_id`; call it before the first process that it may have to end.

    `temp_dirs`: folders to remove at the end; `log_path`: what it did (default: nowhere). Also sets `SPT_NOENV` in
    this process's environment, so that the run's processes keep the mark when they rename themselves.
    """

    def start() -> subprocess.Popen[bytes]:
        process = start_guardian_process(run_id, temp_dirs, log_path, detached=False)
        assert process.stdout is not None, "the guardian was started without a pipe for its greeting"
        with process.stdout as greeting:
            if greeting.readline() != WATCHING:
                raise EngineError(f"the guardian ended with status {process.wait()} instead of watching run {run_id}")
        return process

    return Guardian(start)


def start_guardian_process(
    run_id: str, temp_dirs: Sequence[str], log_path: str | Path | None, *, detached: bool
) -> subprocess.Popen[bytes]:
    """The process, with pipes to its standard input and output.

    `detached`: it leaves this process's children, so that nothing that ends those ends it, and says on its standard
    output how many processes are left when it has done its work (`ENDED`).
    """
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
    if detached:
        command += ["--detached"]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=env,
        start_new_session=True,
        cwd="/",
    )


def ending_guardians(run_id: str) -> list[int]:
    """Pids of the guardians of a run on this host whose owners are gone: they end whatever belongs to it."""
    found = []
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        with contextlib.suppress(OSError):  # gone, or somebody else's
            words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
            owner = dict(pairwise(words)).get("--driver-pid", "")
            if _MODULE in words and run_id in words and owner.isdigit() and _driver_id(pid) is not None:
                found += [pid] * (_driver_id(int(owner)) is None)
    return found


def _driver_id(pid: int) -> ProcessId | None:
    stat = read_stat(pid)
    return stat.id if stat is not None and stat.state not in "ZX" else None


def watch(run_id: str, driver_pid: int, pipe_fd: int) -> tuple[ProcessFamily, SharedMemoryFiles]:
    """Follows the run's processes until the driver closes the pipe or is gone."""
    family = ProcessFamily(RUN_ID_ENV, run_id, spare=[driver_pid])
    files = SharedMemoryFiles()
    driver = _driver_id(driver_pid)
    while driver is not None and _driver_id(driver_pid) == driver:
        began = time.monotonic()
        files.observe(family.refresh())
        # Little of a core, with very many or very large processes too; but an engine that dies soon after its start
        # must have been looked at, or its shared memory is nobody's.
        pause = min(max(LOOK_EVERY_S, 50 * (time.monotonic() - began)), LOOK_AT_LEAST_EVERY_S)
        readable, _, _ = select.select([pipe_fd], [], [], pause)
        if readable:
            break
    return family, files


def end_run(family: ProcessFamily, files: SharedMemoryFiles, temp_dirs: Sequence[str], scratch: str = "") -> int:
    """Ends the family and removes what it left; returns the number of processes that are still there (normally 0).

    `scratch`: a pattern of folders, looked for when nobody is left who could make one.
    """
    left = family.end(grace_s=GRACE_S, limit_s=KILL_LIMIT_S, before_kill=files.observe)
    _log.info("removed from shared memory: %s", files.remove_orphans())
    for folder in (*temp_dirs, *glob.glob(scratch)):
        shutil.rmtree(folder, ignore_errors=True)
    for process in left:
        _log.error("still alive after SIGKILL: pid %d %s in state %s", process.id.pid, process.name, process.state)
    return len(left)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=_MODULE, description="guardian of one run; see the module")
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--driver-pid", type=int, required=True)
    parser.add_argument("--temp-dir", action="append", default=[])
    parser.add_argument("--log")
    parser.add_argument("--detached", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the guardian; the exit status is 1 if a process could not be ended."""
    options = _parse(arguments)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(ignored, signal.SIG_IGN)
    if options.log:
        logging.basicConfig(filename=options.log, level=logging.INFO, format="%(asctime)s %(message)s")
    if options.detached:
        if os.fork():
            os._exit(0)
        os.setsid()
    os.write(1, WATCHING)  # the protocol with who started it
    family, files = watch(options.run_id, options.driver_pid, sys.stdin.fileno())
    _log.info("run %s is over; ending what is left of it", options.run_id)
    scratch = os.path.join(tempfile.gettempdir(), f"slime-{glob.escape(options.run_id)}-*")
    num_left = end_run(family, files, options.temp_dir, scratch)
    if options.detached:
        with contextlib.suppress(BrokenPipeError):  # who started it is gone
            os.write(1, ENDED + b"%d\n" % num_left)
    return 1 if num_left else 0


if __name__ == "__main__":
    sys.exit(main())
