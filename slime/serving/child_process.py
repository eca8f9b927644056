"""`ChildProcess`: one engine process and everything below it, from start to verified end.

Consumes a command, produces a process, its log and, at last, its verified end. The owner's own thread starts, polls and
stops, and waits with a limit each time; nobody wakes it. Nothing runs in the background except one thread per owner
process (`_spawner`), woken by a queue, that does nothing but start children. It exists because Linux delivers a child's
parent-death signal when the *thread* that started it ends, and callers may be short-lived threads.

Invariants
1. The child leads a session of its own: a Ctrl-C in the owner's terminal does not reach it.
2. The child dies with its owner (`slime.serving.launch` asks for the signal), its own children die with it.
3. After `stop()` returns, no process that the child started is alive and their files in shared memory are gone;
   otherwise it raises and names them.
4. Output goes to a file, never to a pipe that nobody may read.
"""

from __future__ import annotations

import contextlib
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
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import slime
from slime.core.blame import here, how_it_ended
from slime.core.errors import DeadlineExceeded, EngineError
from slime.core.files import tail_of
from slime.core.processes import OF_LIBRARIES, scratch_prefix, socket_room
from slime.core.silence import Silence, processor_s

# Who belongs to us: finds and ends processes by a mark in their environment, their ancestry and their session.
#
# Standard library only, so that the guardian of `slime.cluster.guardian` stays small and starts at once.
#
# A process belongs to a `ProcessFamily` if it is a seed, carries the mark `NAME=value` in the environment it was
# executed with, descends from a member, or sits in a session or process group that a member leads. Membership is
# remembered by (pid, start time), because the mark can vanish: `setproctitle` overwrites the memory that
# /proc/<pid>/environ shows (`SPT_NOENV=1` asks it not to), and ancestry vanishes when a parent dies.
#
# Invariants
# 1. A pid is signalled only while its start time is the one that was recorded: a recycled pid is never touched.
# 2. The calling process and its ancestors are never members, whatever their environment says.

KEEP_ENVIRON_ENV = "SPT_NOENV"
"""setproctitle leaves /proc/<pid>/environ alone where this is set."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process of this boot: a pid alone may be recycled."""

    pid: int
    start_ticks: int
    """Clock ticks after boot (field 22 of /proc/<pid>/stat)."""


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """The fields of /proc/<pid>/stat that matter here."""

    id: ProcessId
    name: str
    state: str
    """`Z`: dead, waiting for its parent."""
    parent: int
    group: int
    session: int


def read_stat(pid: int) -> ProcessStat | None:
    """What /proc says of `pid`; None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    head, _, tail = text.rpartition(")")  # the name may hold spaces and parentheses
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
    """Every process that this one can see, by pid."""
    stats = (read_stat(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
    return {s.id.pid: s for s in stats if s is not None}


def has_mark(pid: int, mark: bytes) -> bool:
    """Whether the environment that `pid` was executed with holds the entry `mark` (`NAME=value`)."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(b"\0")
    except OSError:
        return False  # gone, or somebody else's


def ancestors(pid: int) -> set[int]:
    """`pid` and every process above it."""
    found: set[int] = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        stat = read_stat(pid)
        pid = stat.parent if stat else 0
    return found


class ProcessFamily:
    """Remembers who belongs to us; `refresh` looks again, `end` ends them all."""

    def __init__(self, env_name: str, value: str, *, seeds: Iterable[int] = (), spare: Iterable[int] = ()) -> None:
        """`seeds`: pids that belong from the start; `spare`: never do, like this process and its ancestors."""
        self._mark = f"{env_name}={value}".encode()
        self._spare = ancestors(os.getpid()) | set(spare)
        self._members: dict[int, ProcessStat] = {}
        self._leaders: set[int] = set()
        for pid in seeds:
            stat = read_stat(pid)
            if stat is not None and pid not in self._spare:
                self._members[pid] = stat

    def refresh(self) -> list[ProcessStat]:
        """Looks at all processes once (milliseconds) and returns the living members, zombies excluded."""
        processes = all_processes()
        known = {m.id for m in self._members.values()}
        members = {pid: s for pid, s in processes.items() if s.id in known}
        # A dead leader's number names its session (and is not given out again) for as long as that has a process; once
        # it has none, the number means nothing to us any more.
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
        """Sends `signum` to those of `members` that are still the same process."""
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
        """SIGTERM to all, `grace_s` later SIGKILL to the rest; returns who is left after `limit_s` more: normally none.

        `before_kill` sees the living members each time before they are signalled. New members found on the way are
        ended too, so a process that forks while it is being ended does not escape.
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


# Shared-memory files that killed processes leave in /dev/shm, found through the processes that had them.
#
# SGLang leaves its load snapshot and its semaphores behind even after SIGTERM; torch's file_system sharing, Python's
# `SharedMemory` and NCCL leave theirs after SIGKILL. Standard library only.
#
# Invariant: a file is removed only if its name is one of those that these libraries make up, a member of the family had
# it mapped or open (or its name carries a member's pid), it belongs to our user, and no living process has it mapped or
# open. A checkpoint that somebody keeps in /dev/shm is mapped by its readers too, and stays.

SHM = "/dev/shm"
_MAPPED = re.compile(rb" (\d+) +/dev/shm/[^\n]+$", re.MULTILINE)
_MADE_UP = re.compile(r"^(torch_|psm_|sem\.mp-|sglang_loads_|sgl_shm_mq_|nccl-)")
_NAMED_BY_PID = re.compile(r"^(?:torch_|sgl_shm_mq_)(\d+)_")
"""torch's file_system sharing (`torch_<pid>_<random>_<n>`) and SGLang's queues between tensor-parallel ranks."""


def shm_inodes_of(pid: int) -> set[int]:
    """Inodes in /dev/shm that `pid` has mapped or open; empty if it is gone or somebody else's.

    Not paths: glibc makes a semaphore under another name and links it, so /proc shows the name that is gone.
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
    """Our user's files in /dev/shm whose names these libraries make up: name -> inode."""
    files: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(SHM):
            with contextlib.suppress(OSError):
                if _MADE_UP.match(entry.name) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    files[entry.name] = entry.inode()
    return files


class SharedMemoryFiles:
    """Collects what a family of processes has in /dev/shm, and removes it once they are gone."""

    def __init__(self) -> None:
        self._files: set[tuple[str, int]] = set()
        self._pids: set[int] = set()

    def observe(self, members: Iterable[ProcessStat]) -> None:
        """Notes the files of these living processes. Call it before they are ended (milliseconds per process)."""
        pids = {member.id.pid for member in members}
        inodes = set().union(*(shm_inodes_of(pid) for pid in pids))
        self._pids |= pids
        self._files |= {(name, inode) for name, inode in library_files().items() if inode in inodes}

    def remove_orphans(self) -> list[str]:
        """Removes the noted files that no living process uses; returns their names."""
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
"""Marks a child and everything below it."""
OWNER_ENV = "SLIME_OWNER_PID"
"""Pid of the owner, so that a child that starts after its owner died can notice."""
LOG_TAIL_BYTES = 4000
OWN_NAMES = "sglang::"
"""How SGLang calls its schedulers and its detokenizer. Other children (compilers) come and go."""
STOPPED = "tT"
"""States of a process in /proc that somebody stopped."""
STOPPED_LIMIT_S = 4.0
"""How long one may be stopped: a debugger that looks at it does so for less than a second."""
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
    """Runs `job` in the one thread of this process that lives as long as the process."""
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
    """A subprocess `command` with its log, its scratch folder and its family."""

    def __init__(
        self, name: str, command: Sequence[str], *, log_path: Path, env: Mapping[str, str | None] | None = None
    ) -> None:
        """`name` appears in errors; `env`: additions to this process's environment (None removes)."""
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
        """Of its family, as they were last seen."""
        self._stopped_at: float | None = None
        """Since when one of its own is seen to be stopped."""
        self._shared = SharedMemoryFiles()

    @property
    def pid(self) -> int:
        """Pid of the first process. Raises `EngineError` before `start`."""
        if self._popen is None:
            raise EngineError(f"{self.name} has not been started")
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """Whether the first process runs."""
        return self._popen is not None and self._popen.poll() is None

    @property
    def returncode(self) -> int | None:
        """Exit status of the first process; None while it runs or before `start`."""
        return None if self._popen is None else self._popen.poll()

    def problem(self) -> str | None:
        """What is wrong with its processes: the first or one of SGLang's own ended, or somebody stopped one."""
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
        for what, pids in (("is stopped", still), ("has ended", lost)):
            if pids:
                return f"{here(f'{self._named[pids[0]]} of {self.name}')} {what}; its log is {self.log_path}"
        return None

    def processor_s(self) -> float:
        """Processor time that its processes have used so far, seconds."""
        return processor_s(self._named or self._pids)

    def start(self) -> None:
        """Starts the process and returns at once."""
        assert self._popen is None, f"{self.name} was started twice"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        # Engines leave socket files in the temporary folder.
        prefix = scratch_prefix()
        self._scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=socket_room(f"{prefix}XXXXXXXX/{OF_LIBRARIES}")))
        env = {k: v for k, v in {**os.environ, **self._environment()}.items() if v is not None}
        # For our eyes only: prompts and answers may be in it.
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
        """The end of what this start wrote to the log."""
        try:
            return tail_of(self.log_path, limit_bytes, start=self._log_start).strip()
        except OSError as error:
            return f"(no log: {error})"

    def wait_until(self, ready: Callable[[], bool], *, what: str, timeout_s: float) -> None:
        """Polls `ready` until it is true.

        Raises `EngineError` with the end of the log if the process dies first, `DeadlineExceeded` with the last log
        line if it neither computes nor writes into its log for `timeout_s`, or does so for longer than it may
        (`silence`).
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
        """Remembers children, and their shared memory: once they are killed, neither is easy to recognise."""
        if self._family is not None:
            members = self._family.refresh()
            self._pids = [member.id.pid for member in members]
            self._shared.observe(members)

    def stop(self, timeout_s: float = 10.0) -> None:
        """SIGTERM, after `timeout_s` SIGKILL; returns when nothing of the family is left. May be called again.

        Raises `EngineError` naming the processes that even SIGKILL did not end.
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
                f"got {[(s.id.pid, s.name, s.state) for s in left]} still alive after SIGKILL of {self.name}, "
                "because the kernel holds them; look at dmesg and the accelerator"
            )


def python_module(module: str, arguments: Sequence[str]) -> list[str]:
    """Command line of `python -m module arguments` with this interpreter."""
    return [sys.executable, "-m", module, *arguments]
