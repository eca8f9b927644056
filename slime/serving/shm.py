"""Shared-memory files that killed processes leave in /dev/shm, found through the processes that had them.

SGLang leaves its load snapshot and its semaphores behind even after SIGTERM; torch's file_system sharing, Python's
`SharedMemory` and NCCL leave theirs after SIGKILL. Standard library only.

Invariant: a file is removed only if its name is one of those that these libraries make up, a member of the family had
it mapped or open (or its name carries a member's pid), it belongs to our user, and no living process has it mapped or
open. A checkpoint that somebody keeps in /dev/shm is mapped by its readers too, and stays.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from slime.serving.proctree import ProcessStat

SHM = "/dev/shm"
_MAPPED = re.compile(rb" (/dev/shm/[^\n]+)$", re.MULTILINE)
_MADE_UP = re.compile(r"^/dev/shm/(torch_|psm_|sem\.mp-|sglang_loads_|nccl-)[^/]+$")
_NAMED_BY_PID = re.compile(r"^torch_(\d+)_")
"""torch's file_system sharing: `torch_<pid>_<random>_<n>`."""


def shm_files_of(pid: int) -> set[str]:
    """Files of known libraries in /dev/shm that `pid` has mapped or open; empty if it is gone or somebody else's."""
    paths: set[str] = set()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
        paths |= {m.decode(errors="replace") for m in _MAPPED.findall(file.read())}
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(entry.path)
                if target.startswith(SHM + "/"):
                    paths.add(target)
    return {p for p in paths if not p.endswith(" (deleted)") and _MADE_UP.match(p)}


class SharedMemoryFiles:
    """Collects what a family of processes has in /dev/shm, and removes it once they are gone."""

    def __init__(self) -> None:
        self._paths: set[str] = set()
        self._pids: set[int] = set()

    def observe(self, members: Iterable[ProcessStat]) -> None:
        """Notes the files of these living processes. Call it before they are ended (milliseconds per process)."""
        for member in members:
            self._pids.add(member.id.pid)
            self._paths |= shm_files_of(member.id.pid)

    def remove_orphans(self) -> list[str]:
        """Removes the noted files that no living process uses; returns their paths."""
        candidates = {p for p in self._paths if os.path.exists(p)}
        with contextlib.suppress(OSError):
            for entry in os.scandir(SHM):
                named = _NAMED_BY_PID.match(entry.name)
                if named and int(named[1]) in self._pids:
                    candidates.add(entry.path)
        candidates = {p for p in candidates if _is_ours(p)}
        if candidates:
            for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
                candidates -= shm_files_of(pid)
        removed = []
        for path in sorted(candidates):
            with contextlib.suppress(OSError):
                Path(path).unlink()
                removed.append(path)
        return removed


def _is_ours(path: str) -> bool:
    try:
        return os.lstat(path).st_uid == os.geteuid()
    except OSError:
        return False
