"""Where processes stand, and who waits for whom: stacks, torch's flight recorder, and a judgement in one sentence.

A process reports itself (`standing_here`) while it can run Python. A process that is stopped, or that holds the GIL, is
read from outside by py-spy (`standing_of`), which neither runs code in it nor stops it. `judge` compares the standings
of processes that should move together and returns the sentence. It is pure: no clock, no process table.

Invariants
1. Reading a process never blocks longer than `SPY_LIMIT_S` and never raises. A stack that cannot be read is empty, and
   `Standing.unread` says why.
2. `judge` only names a process as the cause if another one waits for it, or if it is stopped.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from slime.core.blame import Place, blamed

SPY_LIMIT_S = 10.0
IDLE = "it has begun no call"
ENGINE = "/site-packages/sglang/"
STOPPED = "Tt"
"""States in /proc of a process that a signal or a debugger has stopped."""
IN_COLLECTIVE = "torch/distributed/distributed_c10d.py"
COALESCED = "_coalescing_manager"
COLLECTIVES = (
    COALESCED,
    "all_",
    "reduce",
    "broadcast",
    "barrier",
    "gather",
    "scatter",
    "send",
    "recv",
    "batch_isend_irecv",
)
"""How the functions of that file begin that wait for other ranks."""
WORKING_THREADS = ("AsyncIO Thread: default", "MainThread")
"""Names of the threads that do the work: that of an asynchronous Ray actor, and that of any other process."""
LIBRARY_WAITS = ("/torch/", *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")), "<")
"""Frames that say less than their callers about what a library is doing."""


@dataclass(frozen=True, slots=True)
class Pending:
    """The oldest collective of a process group that torch's flight recorder does not know to be complete."""

    group: str
    op: str
    """Such as `all_reduce`."""
    number: int
    """Position among the group's collectives, equal on all its ranks."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What one process is doing."""

    name: str
    """As in messages, such as `training rank 1`."""
    host: str
    pid: int
    state: str = ""
    """State in /proc; `T` is stopped by a signal. Empty if unknown."""
    places: tuple[Place, ...] = ()
    """Stack of the thread that matters, outermost frame first."""
    threads: Mapping[str, tuple[Place, ...]] | None = None
    """All threads by name."""
    pending: tuple[Pending, ...] = ()
    enqueued: Mapping[str, int] | None = None
    """Process group -> number of its newest collective."""
    unread: str = ""
    """Why the stack could not be read."""

    @property
    def is_stopped(self) -> bool:
        return bool(self.state) and self.state in STOPPED

    @property
    def collective(self) -> str | None:
        """The collective in which the process waits: by the flight recorder, else by its stack."""
        if self.pending:
            return self.pending[0].op
        for place in reversed(self.places):
            if place.file.endswith(IN_COLLECTIVE) and place.function.startswith(COLLECTIVES):
                return "coalesced collectives" if place.function == COALESCED else place.function
        return None

    @property
    def line(self) -> str:
        """The line to show: of user code, else of the engine that slime has started, else of slime, else of the library
        that is running."""
        own = blamed(self.places)
        engine = next((p for p in reversed(self.places) if ENGINE in p.file), None)
        place = (
            (engine if own is None or own.is_ours else None)
            or own
            or next(
                (p for p in reversed(self.places) if not any(part in p.file for part in LIBRARY_WAITS)),
                self.places[-1] if self.places else None,
            )
        )
        return f"an unknown line ({self.unread or IDLE})" if place is None else str(place)

    def __str__(self) -> str:
        return f"{self.name} on {self.host}"

    def text(self) -> str:
        """Returns the stacks of all threads, innermost frame first, for a report."""
        head = f"{self} (pid {self.pid}, state {self.state or 'unknown'})"
        lines = [f"{head}: {self.unread}" if self.unread else head]
        if self.pending:
            lines += [f"  waits in {p.op}, number {p.number} of process group {p.group}" for p in self.pending]
        for thread, places in (self.threads or {"": self.places}).items():
            lines.append(f"  thread {thread}")
            lines += [f"    {place}" for place in reversed(places)]
        return "\n".join(lines)


# --- Reading stacks


def _stack_of(frame: FrameType | None) -> tuple[Place, ...]:
    places = []
    while frame is not None:
        places.append(Place(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(reversed(places))


def choose(threads: Mapping[str, tuple[Place, ...]], call_file: str | None = None) -> tuple[Place, ...]:
    """Returns the stack that matters: in a collective, or in a call of `call_file`. Empty if there is none.

    `call_file`: end of the path of the file whose calls are work. None: the work is done by the thread with the event
    loop, or by the main thread.
    """
    stacks = [stack for stack in threads.values() if stack]
    for stack in stacks:
        if any(p.file.endswith(IN_COLLECTIVE) and p.function.startswith(COLLECTIVES) for p in stack):
            return stack
    for stack in stacks:
        if call_file is not None and any(p.file.endswith(call_file) for p in stack):
            return stack
    if call_file is not None:
        return ()
    for name in WORKING_THREADS:
        for thread, stack in threads.items():
            if thread.startswith(name) and stack:
                return stack
    return stacks[0] if stacks else ()


def standing_here(name: str, call_file: str, *, deep: bool = False) -> Standing:
    """Returns this process's standing. `places` is empty if no thread but this one is in a call of `call_file`.

    `deep`: also report all threads and the pending collectives.
    """
    own, names = threading.get_ident(), {t.ident: t.name for t in threading.enumerate()}
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != own}
    threads = {f"{names.get(ident, '?')} {ident}": _stack_of(frame) for ident, frame in frames.items()}
    busy = {key: stack for key, stack in threads.items() if any(p.file.endswith(call_file) for p in stack)}
    pending, enqueued = flight_record(deep) if busy else ((), {})
    return Standing(
        name,
        socket.gethostname(),
        os.getpid(),
        places=choose(busy, call_file),
        threads=threads if deep else None,
        pending=pending,
        enqueued=enqueued,
    )


def flight_record(deep: bool = True) -> tuple[tuple[Pending, ...], dict[str, int]]:
    """Returns the pending collectives of this process (only if `deep`) and the newest number of each process group.

    Both are empty if torch is not loaded or its flight recorder (TORCH_FR_BUFFER_SIZE) records nothing.
    """
    module = sys.modules.get("torch._C._distributed_c10d")
    found, newest = [], dict[str, int]()
    for dump in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if module is None or not hasattr(module, dump):
            continue
        try:
            record = json.loads(getattr(module, dump)(includeCollectives=deep))
        except (RuntimeError, ValueError):
            continue
        pending, numbers = pending_in(record)
        found += pending
        newest |= numbers
    return tuple(found), newest


def pending_in(record: Mapping[str, Any]) -> tuple[list[Pending], dict[str, int]]:
    """Reads one record of torch's flight recorder. Returns its pending collectives and newest numbers by group."""
    status, entries = record.get("pg_status") or {}, record.get("entries") or ()
    # `pg_id` counts the groups of this process, so only the name of a group is the same on all its ranks.
    names = {str(e.get("pg_id")): str((e.get("process_group") or [e.get("pg_id")])[0]) for e in entries}
    newest = {names.get(id, id): int(s["last_enqueued_collective"]) for id, s in status.items()}
    done = {names.get(id, id): int(s["last_completed_collective"]) for id, s in status.items()}
    oldest: dict[str, Pending] = {}
    for entry in entries:
        group, number = names[str(entry.get("pg_id"))], int(entry["collective_seq_id"])
        is_done = entry.get("retired") or entry.get("state") == "completed" or number <= done.get(group, -1)
        if not is_done and not entry.get("is_p2p") and group not in oldest:
            _, _, op = str(entry.get("profiling_name", "")).rpartition(":")
            oldest[group] = Pending(group, op, number)
    return list(oldest.values()), {group: number for group, number in newest.items() if number >= 0}


def process_state(pid: int) -> str:
    """Returns the state of a process on this host in /proc, or "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


def standing_of(pid: int, name: str, call_file: str | None = None) -> Standing:
    """Returns the standing of another process on this host, read with py-spy. `call_file`: see `choose`."""
    plain = Standing(name, socket.gethostname(), pid, process_state(pid))
    spy = shutil.which("py-spy", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]))
    if spy is None:
        return replace(plain, unread="py-spy is not installed: pip install py-spy")
    try:
        done = subprocess.run(
            [spy, "dump", "--nonblocking", "--full-filenames", "--json", "--pid", str(pid)],
            capture_output=True,
            timeout=SPY_LIMIT_S,
            check=False,
        )
        threads = threads_in(json.loads(done.stdout or b"null"))
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return replace(plain, unread=f"py-spy failed: {type(error).__name__}")
    if not threads:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return replace(plain, unread=f"py-spy cannot read it: {said[0] if said else 'no Python thread'}")
    return replace(plain, places=choose(threads, call_file), threads=threads)


def threads_in(dump: Any) -> dict[str, tuple[Place, ...]]:
    """Returns the stacks in the JSON output of `py-spy dump`, by thread."""
    return {
        f"{thread.get('thread_name') or '?'} {thread.get('os_thread_id') or thread.get('thread_id')}": tuple(
            Place(str(f["filename"]), int(f["line"]), str(f["name"])) for f in reversed(thread["frames"])
        )
        for thread in dump or ()
    }


def gpu_state() -> str:
    """Returns one line per GPU of this host: utilisation, memory, power and clocks. Empty without nvidia-smi."""
    query = "index,name,utilization.gpu,memory.used,memory.total,power.draw,clocks.sm,temperature.gpu"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv"],
            capture_output=True,
            timeout=SPY_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else ""


# --- Who waits for whom


@dataclass(frozen=True, slots=True)
class Verdict:
    text: str
    """One sentence."""
    culprits: tuple[Standing, ...] = ()
    """The processes that the others wait for; empty if no single one is to blame."""


MOST_NAMED = 8
"""Number of waiting processes that a sentence names."""


def _names(standings: Sequence[Standing]) -> str:
    numbers = [s.name.removeprefix("training rank ") for s in standings]
    if len(standings) > 1 and all(n.isdigit() for n in numbers):
        more = f" and {len(numbers) - MOST_NAMED} more" if len(numbers) > MOST_NAMED else ""
        return f"training ranks {', '.join(numbers[:MOST_NAMED])}{more}"
    more = f" and {len(standings) - MOST_NAMED} more" if len(standings) > MOST_NAMED else ""
    return ", ".join(map(str, standings[:MOST_NAMED])) + more


def _where(standing: Standing) -> str:
    inside = f" in {standing.collective}" if standing.collective else ""
    if not standing.is_stopped:
        return f"stands{inside} at {standing.line}"
    return f"is stopped (state {standing.state}; kill -CONT {standing.pid} continues it){inside} at {standing.line}"


def behind(standings: Sequence[Standing]) -> tuple[list[Standing], Pending | None]:
    """Returns the processes that have not begun a collective that others wait in, by the flight recorder's numbers."""
    for waiting in standings:
        for pending in waiting.pending:
            group = pending.group
            late = [s for s in standings if s.enqueued and -1 < s.enqueued.get(group, -1) < pending.number]
            if late:
                return late, pending
    return [], None


def judge(standings: Sequence[Standing], *, waits_for: str = "") -> Verdict:
    """Returns who waits for whom. `standings`: processes that work together, at least one of which is stuck.

    `waits_for`: what the driver waits for, such as `training step 3`.
    """
    during = f" during {waits_for}" if waits_for else ""
    stopped = [s for s in standings if s.is_stopped]
    late, missed = behind(standings)
    inside: dict[str, list[Standing]] = defaultdict(list)
    for standing in standings:
        if standing.collective is not None and not standing.is_stopped:
            inside[standing.collective].append(standing)
    outside = [s for s in standings if s.collective is None and not s.is_stopped and (s.places or s.unread)]
    waiting = [s for some in inside.values() for s in some]
    culprits = stopped or late or (outside if waiting else [])
    if culprits:
        own = {id(c) for c in culprits}
        told = "; ".join(f"{culprit} {_where(culprit)}" for culprit in culprits[:MOST_NAMED])
        waiting = [s for s in waiting if id(s) not in own]
        if not waiting:
            return Verdict(f"{told}{during}", tuple(culprits))
        op = missed.op if missed is not None and not stopped else waiting[0].collective
        where = f"in {op} at {waiting[0].line}"
        verb = "waits" if len(waiting) == 1 else "wait"
        text = f"{_names(waiting)} {verb} {where} for {_names(culprits)}{during}: {told}"
        return Verdict(text, tuple(culprits))
    if len(inside) > 1:
        parts = [f"{_names(some)} in {op} at {some[0].line}" for op, some in inside.items()]
        return Verdict(f"ranks wait in different collectives, so none can end{during}: {'; '.join(parts)}", ())
    if inside:
        ((op, some),) = inside.items()
        return Verdict(
            f"{_names(some)} all wait in {op} at {some[0].line}{during}, so the network or a device between them "
            "does not deliver",
            (),
        )
    told = "; ".join(f"{s} {_where(s)}" for s in standings[:MOST_NAMED]) or "no process could be read"
    return Verdict(f"nothing moves{during}: {told}", tuple(standings) if len(standings) == 1 else ())
