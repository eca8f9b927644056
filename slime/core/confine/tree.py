"""What the processes of a tree use of memory: the bound where no control group is lent, since the kernel bounds each
process alone.

What counts is memory of their own and shared memory, not files. First the sum of what each has mapped, which costs
little; only where that is too much, what they share is counted once, as the kernel divides it among them. What the
kernel keeps for sockets and pipes is nowhere said: so many may be open as would have that memory if all were full.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Collection, Iterable
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """None of a process that is gone."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def descendants_of(pids: Iterable[int]) -> list[int]:
    """All processes below these."""
    found, left = [], list(pids)
    while left:
        children = children_of(left.pop())
        found += children
        left += children
    return found


def fields_of(pid: int) -> dict[str, str]:
    """What the kernel says of a process; empty if it is gone."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}


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
    try:
        return os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return []


def _buffers(pids: Iterable[int]) -> set[str]:
    """The kernel's names of their sockets and pipes."""
    found = set()
    for pid in pids:
        for name in _open_of(pid):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return {name for name in found if name.startswith(("socket:", "pipe:"))}


def _mapped_bytes(pid: int) -> int:
    fields = fields_of(pid)
    return _sum_kib(fields.get(name, "0 kB") for name in ("RssAnon", "RssShmem"))


def _share_bytes(pid: int) -> int:
    """Its share of what it has mapped; all of it where the kernel does not say that."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return _mapped_bytes(pid)
    fields = dict(line.split(":", 1) for line in lines[1:])
    return _sum_kib(fields[name] for name in ("Pss_Anon", "Pss_Shmem")) if "Pss_Anon" in fields else _mapped_bytes(pid)


def _sum_kib(sizes: Iterable[str]) -> int:
    return sum(1024 * int(size.split()[0]) for size in sizes)
