"""`ChildProcess` manages an engine process and its descendants from start to verified exit.

The owner starts, polls and stops it from its own thread, and every wait has a timeout. One background thread per owner
process (`_spawner`) starts all children, because Linux sends a child its parent-death signal when the *thread* that
started it exits, and the calling thread may be short-lived.

`ProcessFamily` finds and kills processes. `SharedMemoryFiles` deletes the files that they leave in /dev/shm. Both use
only the standard library, so that the guardian (`slime.cluster.guardian`) stays small and starts fast.

Invariants
1. The child is a session leader, so a Ctrl-C in the owner's terminal does not reach it.
2. The child dies with its owner (`slime.serving.launch` requests the signal), and its children die with it.
3. When `stop()` returns, the child and its descendants are dead and their shared-memory files are deleted. If a process
   survives, `stop` raises an error that names it.
4. Output goes to a file, never to a pipe that nobody may read.
5. A process is signalled only if its start time matches the recorded one, so signals never hit a reused pid.
6. The calling process and its ancestors never become members of a family.
7. A file in /dev/shm is deleted only if all of these hold: its name has a known library prefix (`_MADE_UP`), a member
   of the family mapped or opened it (or its name contains a member's pid), it belongs to our user, and no running
   process uses it. A checkpoint in /dev/shm stays even if members mapped it, because its name has no such prefix.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import slime
from slime.core.blame import here, how_it_ended
from slime.core.errors import DeadlineExceeded, EngineError
from slime.core.files import tail_of
from slime.core.liveness import Silence, processor_s
from slime.core.processes import OF_LIBRARIES, scratch_prefix, socket_room
from slime.observability.stacks import judge, standing_of

logger = logging.getLogger(__name__)

KEEP_ENVIRON_ENV = "SPT_NOENV"
"""If set, setproctitle does not overwrite /proc/<pid>/environ."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """Identifies a process uniquely since boot. A pid alone can be reused."""

    pid: int
    start_ticks: int
    """Start time in clock ticks after boot (field 22 of /proc/<pid>/stat)."""


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """The state of a process, from /proc/<pid>/stat."""

    id: ProcessId
    name: str
    state: str
    """`Z` is a zombie: dead but not yet reaped by its parent."""
    parent: int
    group: int
    session: int


def read_stat(pid: int) -> ProcessStat | None:
    """Returns None if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    head, _, tail = text.rpartition(")")  # the name may contain spaces and parentheses
    fields = tail.split()
    return ProcessStat(
        id=ProcessId(pid, int(fields[19])),
        name=head.partition("(")[2],
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
    )


def all_processes() -> dict[int, ProcessStat]:
    stats = (read_stat(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
    return {s.id.pid: s for s in stats if s is not None}


def has_mark(pid: int, mark: bytes) -> bool:
    """Returns whether `pid` was started with the environment entry `mark` (`NAME=value`)."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(b"\0")
    except OSError:
        return False  # gone, or owned by another user


def ancestors(pid: int) -> set[int]:
    """Returns `pid` and the pids of all its ancestors."""
    found: set[int] = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        stat = read_stat(pid)
        pid = stat.parent if stat else 0
    return found


class ProcessFamily:
    """A set of related processes: the seeds, all processes with `NAME=value` in their environment, all descendants of
    members, and all processes in a session or process group led by a member.

    Members are tracked by (pid, start time), because the criteria can stop matching: `setproctitle` overwrites the
    memory behind /proc/<pid>/environ (unless `SPT_NOENV=1` is set), and ancestry is lost when a parent dies.
    """

    def __init__(self, env_name: str, value: str, *, seeds: Iterable[int] = (), spare: Iterable[int] = ()) -> None:
        """`seeds`: pids of the initial members; `spare`: pids that must never become members."""
        self._mark = f"{env_name}={value}".encode()
        self._spare = ancestors(os.getpid()) | set(spare)
        self._members: dict[int, ProcessStat] = {}
        self._leaders: set[int] = set()
        for pid in seeds:
            stat = read_stat(pid)
            if stat is not None and pid not in self._spare:
                self._members[pid] = stat

    def refresh(self) -> list[ProcessStat]:
        """Scans all processes (takes milliseconds) and returns the running members, without zombies."""
        processes = all_processes()
        known = {m.id for m in self._members.values()}
        members = {pid: s for pid, s in processes.items() if s.id in known}
        # The kernel reuses a dead leader's pid only after its group and session are empty.
        in_use = {n for s in processes.values() for n in (s.group, s.session)}
        leaders = {pid for pid in self._leaders | self._members.keys() if pid in in_use and pid not in processes}
        members |= {pid: s for pid, s in processes.items() if pid not in self._spare and has_mark(pid, self._mark)}
        grown = True
        while grown:
            grown = False
            for pid, stat in processes.items():
                if pid in members or pid in self._spare:
                    continue
                if stat.parent in members or {stat.group, stat.session} & (members.keys() | leaders):
                    members[pid] = stat
                    grown = True
        self._members, self._leaders = members, leaders
        return [s for s in members.values() if s.state not in "ZX"]

    def signal(self, signum: int, members: Iterable[ProcessStat]) -> None:
        """Sends `signum` to each member, unless its pid now belongs to a different process."""
        for member in members:
            now = read_stat(member.id.pid)
            if now is not None and now.id == member.id:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(member.id.pid, signum)

    def end(
        self,
        *,
        grace_s: float,
        limit_s: float = 60.0,
        before_kill: Callable[[list[ProcessStat]], None] | None = None,
    ) -> list[ProcessStat]:
        """Sends SIGTERM to all members and, after `grace_s`, SIGKILL to those still running. Returns the members that
        survive another `limit_s`, normally none.

        Calls `before_kill` with the running members before each signal. Also kills processes forked in the meantime.
        """
        living = self.refresh()
        if before_kill:
            before_kill(living)
        self.signal(signal.SIGTERM, living)
        deadline = time.monotonic() + grace_s
        while (living := self.refresh()) and time.monotonic() < deadline:
            time.sleep(0.05)
        deadline = time.monotonic() + limit_s
        while living and time.monotonic() < deadline:
            if before_kill:
                before_kill(living)
            self.signal(signal.SIGKILL, living)
            time.sleep(0.05)
            living = self.refresh()
        return living


SHM = "/dev/shm"
_MAPPED = re.compile(rb" (\d+) +/dev/shm/[^\n]+$", re.MULTILINE)
_MADE_UP = re.compile(r"^(torch_|psm_|sem\.mp-|sglang_loads_|sgl_shm_mq_|nccl-)")
_NAMED_BY_PID = re.compile(r"^(?:torch_|sgl_shm_mq_)(\d+)_")
"""Matches files of torch's file_system sharing (`torch_<pid>_<random>_<n>`) and of SGLang's queues between TP ranks."""


def shm_inodes_of(pid: int) -> set[int]:
    """Returns the inodes in /dev/shm that `pid` has mapped or open. Empty if `pid` is gone or belongs to another user.

    Paths are not enough: glibc creates a semaphore under a temporary name before linking it, and /proc shows that name.
    """
    inodes: set[int] = set()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
        inodes |= {int(m) for m in _MAPPED.findall(file.read())}
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path).startswith(SHM + "/"):
                    inodes.add(os.stat(entry.path).st_ino)
    return inodes


def library_files() -> dict[str, int]:
    """Maps name to inode for our user's files in /dev/shm with a prefix in `_MADE_UP`."""
    files: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(SHM):
            with contextlib.suppress(OSError):
                if _MADE_UP.match(entry.name) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    files[entry.name] = entry.inode()
    return files


class SharedMemoryFiles:
    """Tracks a process family's files in /dev/shm so that they can be deleted after the processes exit.

    Killed processes leave behind files of torch's file_system sharing, Python's `SharedMemory` and NCCL. SGLang leaves
    its load snapshot and semaphores behind even after SIGTERM.
    """

    def __init__(self) -> None:
        self._files: set[tuple[str, int]] = set()
        self._pids: set[int] = set()

    def observe(self, members: Iterable[ProcessStat]) -> None:
        """Records the files of these running processes (takes milliseconds each). Call it before killing them."""
        pids = {member.id.pid for member in members}
        inodes = set().union(*(shm_inodes_of(pid) for pid in pids))
        self._pids |= pids
        self._files |= {(name, inode) for name, inode in library_files().items() if inode in inodes}

    def remove_orphans(self) -> list[str]:
        """Deletes the recorded files that no running process uses. Returns their names."""
        candidates = {
            name: inode
            for name, inode in library_files().items()
            if (name, inode) in self._files or ((m := _NAMED_BY_PID.match(name)) and int(m[1]) in self._pids)
        }
        if not candidates:
            return []
        in_use = set().union(*(shm_inodes_of(int(p)) for p in os.listdir("/proc") if p.isdigit()))
        removed = []
        for name, inode in sorted(candidates.items()):
            if inode not in in_use:
                with contextlib.suppress(OSError):
                    Path(SHM, name).unlink()
                    removed.append(name)
        return removed


FAMILY_ENV = "SLIME_CHILD_ID"
"""Environment variable that marks a child and its descendants."""
OWNER_ENV = "SLIME_OWNER_PID"
"""Environment variable with the owner's pid. Lets a child detect that its owner died before the child started."""
LOG_TAIL_BYTES = 4000
OWN_NAMES = "sglang::"
"""Process-name prefix of SGLang's schedulers and detokenizer. Other children, such as compilers, come and go."""
STOPPED = "tT"
"""States in /proc/<pid>/stat that mean that a process is stopped."""
MOST_SPIES = 8
"""Number of stacks that are read at a time."""
STOPPED_LIMIT_S = 4.0
"""How long a process may stay stopped. A debugger or profiler stops a process for less than a second."""
LOOK_EVERY_S = 1.0
_POLL_S = 0.1

_jobs: queue.SimpleQueue[tuple[Callable[[], subprocess.Popen[bytes]], Future[subprocess.Popen[bytes]]]] = (
    queue.SimpleQueue()
)
_spawner_lock = threading.Lock()
_spawner: threading.Thread | None = None
_spawner_pid = 0


def _spawn_loop() -> None:
    while True:
        job, future = _jobs.get()
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)


def _spawn(job: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Runs `job` in a thread that lives as long as this process."""
    global _spawner, _spawner_pid
    with _spawner_lock:
        if _spawner is None or _spawner_pid != os.getpid():  # threads do not survive a fork
            _spawner = threading.Thread(target=_spawn_loop, name="slime-spawner", daemon=True)
            _spawner_pid = os.getpid()
            _spawner.start()
    future: Future[subprocess.Popen[bytes]] = Future()
    _jobs.put((job, future))
    return future.result()


class ChildProcess:
    """Runs `command` as a subprocess with a log, a scratch folder and a process family."""

    def __init__(
        self, name: str, command: Sequence[str], *, log_path: Path, env: Mapping[str, str | None] | None = None
    ) -> None:
        """`name`: used in error messages; `env`: changes to the inherited environment (None removes a variable)."""
        self.name = name
        self.command = list(command)
        self.log_path = Path(log_path)
        self._env = dict(env or {})
        self._family_id = secrets.token_hex(8)
        self._popen: subprocess.Popen[bytes] | None = None
        self._family: ProcessFamily | None = None
        self._log_start = 0
        self._scratch: Path | None = None
        self._named: dict[int, str] = {}
        self._pids: list[int] = []
        """Pids of the family at the last check."""
        self._stopped_at: float | None = None
        """Monotonic time at which a process was found stopped; None if none is stopped."""
        self._shared = SharedMemoryFiles()

    @property
    def pid(self) -> int:
        """Pid of the first process. Raises `EngineError` before `start`."""
        if self._popen is None:
            raise EngineError(f"{self.name} has not been started")
        return self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def returncode(self) -> int | None:
        """Exit status of the first process; None while it runs or before `start`."""
        return None if self._popen is None else self._popen.poll()

    def problem(self) -> str | None:
        """Says which process (the first, or one of SGLang's own) has exited or is stopped. None if all are running."""
        if self._family is None or not self.alive:
            return here(self.name, self.log_path).ended(self.returncode)
        members = {member.id.pid: member for member in self._family.refresh()}
        own = {pid: m.name for pid, m in members.items() if pid == self.pid or m.name.startswith(OWN_NAMES)}
        stopped = [pid for pid in own if members[pid].state in STOPPED]
        lost = [pid for pid in self._named if pid not in own]
        self._named |= own
        now = time.monotonic()
        self._stopped_at = (self._stopped_at or now) if stopped else None
        still = stopped if now - (self._stopped_at or now) > STOPPED_LIMIT_S else []
        if still:
            return f"{self.stands(still)}; its log is {self.log_path}"
        if lost:
            return f"{here(f'{self._named[lost[0]]} of {self.name}')} has exited; its log is {self.log_path}"
        return None

    def stands(self, pids: Sequence[int] | None = None) -> str:
        """Returns where processes of the engine stand and who waits for whom, in one sentence, and logs all stacks.

        `pids`: by default, the engine's own processes (`OWN_NAMES`). Takes at most `SPY_LIMIT_S`.
        """
        wanted = {pid: self._named.get(pid, "a process") for pid in (self._named if pids is None else pids)}
        with ThreadPoolExecutor(max(1, min(len(wanted), MOST_SPIES))) as pool:
            standings = list(pool.map(lambda one: standing_of(one[0], f"{one[1]} of {self.name}"), wanted.items()))
        logger.warning("stacks of %s:\n%s", self.name, "\n\n".join(standing.text() for standing in standings))
        return judge(standings).text

    def processor_s(self) -> float:
        return processor_s(self._named or self._pids)

    def start(self) -> None:
        """Starts the process and returns immediately."""
        assert self._popen is None, f"{self.name} was started twice"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        # Engines create their socket files here.
        prefix = scratch_prefix()
        self._scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=socket_room(f"{prefix}XXXXXXXX/{OF_LIBRARIES}")))
        env = {k: v for k, v in {**os.environ, **self._environment()}.items() if v is not None}
        # The log can contain prompts and responses, so only our user may read it.
        with open(self.log_path, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
            self._log_start = log.tell()
            log.write(f"$ {' '.join(self.command)}\n".encode())
            log.flush()
            self._popen = _spawn(lambda: self._popen_now(log, env))
        self._family = ProcessFamily(FAMILY_ENV, self._family_id, seeds=[self._popen.pid])
        self._family.refresh()

    def _environment(self) -> dict[str, str | None]:
        root = str(Path(slime.__file__).resolve().parent.parent)
        paths = [root, *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != root)]
        return {
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(self._scratch),
            KEEP_ENVIRON_ENV: "1",
            FAMILY_ENV: self._family_id,
            OWNER_ENV: str(os.getpid()),
            **self._env,
        }

    def _popen_now(self, log: IO[bytes], env: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )

    def log_tail(self, limit_bytes: int = LOG_TAIL_BYTES) -> str:
        """Returns the last part of the log, excluding earlier starts."""
        try:
            return tail_of(self.log_path, limit_bytes, start=self._log_start).strip()
        except OSError as error:
            return f"(no log: {error})"

    def wait_until(self, ready: Callable[[], bool], *, what: str, timeout_s: float) -> None:
        """Polls `ready` until it is true.

        Raises `EngineError` with the end of the log if the process dies first. Raises `DeadlineExceeded` with the last
        log line if the process uses no CPU time and logs nothing for `timeout_s`, or is busy for much longer
        (`slime.core.liveness`).
        """
        silence = Silence(lambda: processor_s(self._pids), file=self.log_path)
        next_look = 0.0
        while True:
            if not self.alive:
                raise EngineError(
                    f"{here(self.name)} {how_it_ended(self.returncode)} before {what}; the end of its log "
                    f"{self.log_path}:\n{self.log_tail()}"
                )
            if ready():
                self._look()
                return
            if silence.exceeds(timeout_s):
                last = self.log_tail(2000).splitlines()
                raise DeadlineExceeded.waiting(
                    owner=f"the owner of {self.name}",
                    for_what=f"{what} (log: {self.log_path})",
                    limit_s=silence.lasts_s,
                    last_progress=last[-1] if last else "none",
                )
            if time.monotonic() > next_look:
                self._look()
                next_look = time.monotonic() + LOOK_EVERY_S
            time.sleep(_POLL_S)

    def _look(self) -> None:
        """Records children and their shared memory, which can no longer be identified once the children are killed."""
        if self._family is not None:
            members = self._family.refresh()
            self._pids = [member.id.pid for member in members]
            self._shared.observe(members)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Sends SIGTERM, then SIGKILL after `timeout_s`. Returns once the whole family has exited. Idempotent.

        Raises an `EngineError` that names the processes if any survive SIGKILL.
        """
        if self._popen is None or self._family is None:
            return
        left = self._family.end(grace_s=timeout_s, before_kill=self._shared.observe)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=5)
        self._shared.remove_orphans()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        if left:
            raise EngineError(
                f"processes of {self.name} survived SIGKILL: {[(s.id.pid, s.name, s.state) for s in left]}; they "
                "are stuck in the kernel, so check dmesg and the accelerator"
            )


def python_module(module: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", module, *arguments]
