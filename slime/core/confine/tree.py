"""What the processes of a tree use of memory: the bound where no control group is lent, since the kernel bounds each
process alone.

What counts is memory of their own, swapped or not, and shared memory, not files. First the sum of what each has mapped,
which costs little; only where that is too much, what they share is counted once, as the kernel divides it among them.
What the kernel keeps for sockets and pipes is nowhere said: so many may be open as would have that memory if all were
full.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Collection, Iterable
from pathlib import Path

_OF_STATUS = ("RssAnon", "RssShmem", "HugetlbPages", "VmSwap")
_OF_MAPS = ("Pss_Anon", "Pss_Shmem", "SwapPss", "Private_Hugetlb", "Shared_Hugetlb")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def threads_of(pid: int) -> list[int]:
    """The main one first, which may have ended before others; none of a process that is gone."""
    try:
        return sorted(map(int, os.listdir(f"/proc/{pid}/task")), key=lambda thread: thread != pid)
    except OSError:
        return []


def children_of(pid: int) -> list[int]:
    """Those that any thread of it started; none of a process that is gone."""
    found: list[int] = []
    for thread in threads_of(pid):
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def descendants_of(pids: Iterable[int]) -> list[int]:
    """All processes below these."""
    found, left = [], list(pids)
    while left:
        children = children_of(left.pop())
        found += children
        left += children
    return found


def lives(pid: int) -> bool:
    """Whether a thread of it still runs; a process without one merely waits to be reaped."""
    return any(fields_of(thread).get("State", "Z")[0] not in "ZX" for thread in threads_of(pid))


def fields_of(pid: int) -> dict[str, str]:
    """What the kernel says of a process, or of a thread; empty if it is gone."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}


def processor_s(pids: Iterable[int]) -> float:
    """Processor time of these processes, and of the children that they waited for, in seconds."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / _TICKS_PER_S


def exceeds(pids: Collection[int], most_bytes: int) -> bool:
    """Whether these processes together have more memory, or more sockets and pipes than could be filled with it."""
    if sum(map(_mapped_bytes, pids)) > most_bytes and sum(map(_share_bytes, pids)) > most_bytes:
        return True
    most_open = most_bytes // _buffer_bytes()
    return sum(len(_open_of(pid)) for pid in pids) > most_open and len(_buffers(pids)) > most_open


@functools.cache
def _buffer_bytes() -> int:
    """Of a socket, which has more than a pipe, where no process may change it (`calls`)."""
    one, other = socket.socketpair()
    with one, other:
        return one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def _open_of(pid: int) -> list[str]:
    """Paths of its descriptors. A thread that has ended shows none."""
    for thread in threads_of(pid):
        with contextlib.suppress(OSError):
            if names := os.listdir(f"/proc/{thread}/fd"):
                return [f"/proc/{thread}/fd/{name}" for name in names]
    return []


def _buffers(pids: Iterable[int]) -> set[str]:
    """The kernel's names of their sockets and pipes."""
    found = set()
    for pid in pids:
        for name in _open_of(pid):
            with contextlib.suppress(OSError):
                found.add(os.readlink(name))
    return {name for name in found if name.startswith(("socket:", "pipe:"))}


def _with_memory(pid: int) -> tuple[int, dict[str, str]]:
    """A thread that the kernel tells the process's memory of, with its fields; it tells none of one that has ended."""
    fields: dict[str, str] = {}
    for thread in (pid, *threads_of(pid)[1:]):
        fields = fields_of(thread)
        if "RssAnon" in fields:
            return thread, fields
    return pid, fields


def _mapped_bytes(pid: int) -> int:
    fields = _with_memory(pid)[1]
    return _sum_kib(fields.get(name, "0 kB") for name in _OF_STATUS)


def _share_bytes(pid: int) -> int:
    """Its share of what it has mapped; all of it where the kernel does not say that."""
    try:
        lines = Path(f"/proc/{_with_memory(pid)[0]}/smaps_rollup").read_text().splitlines()
    except OSError:
        return _mapped_bytes(pid)
    fields = dict(line.split(":", 1) for line in lines[1:])
    return _sum_kib(fields.get(name, "0 kB") for name in _OF_MAPS) if "Pss_Anon" in fields else _mapped_bytes(pid)


def _sum_kib(sizes: Iterable[str]) -> int:
    return sum(1024 * int(size.split()[0]) for size in sizes)
