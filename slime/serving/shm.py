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
