"""Who belongs to us: finds and ends processes by a mark in their environment, their ancestry and their session.

Standard library only, so that the guardian of `slime.cluster.guardian` stays small and starts at once.

A process belongs to a `ProcessFamily` if it is a seed, carries the mark `NAME=value` in the environment it was executed
with, descends from a member, or sits in a session or process group that a member leads. Membership is remembered by
(pid, start time), because the mark can vanish: `setproctitle` overwrites the memory that /proc/<pid>/environ shows
(`SPT_NOENV=1` asks it not to), and ancestry vanishes when a parent dies.

Invariants
1. A pid is signalled only while its start time is the one that was recorded: a recycled pid is never touched.
2. The calling process and its ancestors are never members, whatever their environment says.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

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
