"""How a process is held that runs what others wrote: programs of a model, commands of an agent, foreign pickles.

One implementation for all three. A supervisor leaves the network and the other namespaces and becomes a user that
nobody else is (`leave`), builds what its children see of the file system (`view`), and forks them. Each of these takes
its limits, gives up its rights, and with Landlock and a filter of system calls (`landlock`, `calls`) what is left of
files, sockets and calls (`give_up`). While they run, the supervisor looks at their memory (`tree`).

Standard library only, Linux only: supervisors run this without any package.

Invariants
1. What was given up does not come back, in the process and all that it starts.
2. A process that root starts is another user's afterwards, wherever root may change that: the kernel bounds the number
   of processes of everybody but root.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import resource
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

from slime.core.confine import landlock
from slime.core.confine.calls import Calls

__all__ = ["CALLS", "LANDLOCK", "Calls", "any_user", "become", "close_all_but", "give_up", "leave", "show_own_files"]

FIRST_USER, NUM_USERS = 1_000_000_000, 1_000_000_000
"""Users that no system gives out."""
NEW_MOUNTS, NEW_NAMES, NEW_IPC = 0x00020000, 0x04000000, 0x08000000
NEW_USER, NEW_PROCESSES, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
LANDLOCK, CALLS = "Landlock", "seccomp"
MEMORY_LOCKED_BYTES = 1 << 16
_SET_DUMPABLE, _SET_NO_NEW_PRIVS = 4, 38
_CAPABILITY_VERSION_3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


def any_user() -> int:
    """A user and group, by chance, that nobody else is."""
    return FIRST_USER + secrets.randbelow(NUM_USERS)


def become(user: int) -> None:
    """This process of root's is another user's from now on."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def show_own_files() -> None:
    """This process may read its own files in /proc again, which a change of user takes."""
    _libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0)


def leave(namespaces: int, user: int | None = None, *, keep: Iterable[str] = ()) -> dict[str, int] | None:
    """Moves this process, which must have one thread, into new namespaces of these kinds; None where not permitted.

    A user namespace of its own makes that possible without privileges, on kernels and in containers that allow it.
    `user`: whom a process of root's is from then on, if it may become another; it keeps its rights in the namespaces.
    `keep`: files and folders for a `view`; the result has a descriptor of each, for another user might not find them.
    Raises `OSError` if one is not there.
    """
    uid, gid = os.getuid(), os.getgid()
    change = user is not None and uid == 0
    tell, mapper = _start_mapper(user) if change and user is not None else (-1, 0)
    left = whole = _libc.unshare(NEW_USER | namespaces) == 0
    mapped = False
    if change:
        os.write(tell, b"1" if left else b"0")
        os.close(tell)
        mapped = os.waitpid(mapper, 0)[1] == 0
    whole = whole or _libc.unshare(namespaces) == 0
    kept = {path: os.open(path, os.O_PATH) for path in keep} if whole else {}
    if mapped and user is not None:
        become(user)
        show_own_files()
    elif left:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with contextlib.suppress(OSError):  # without its names the process still has its rights
                Path("/proc/self", name).write_text(text)
    return kept if whole else None


def _start_mapper(user: int) -> tuple[int, int]:
    """A process that gives this one, in its user namespace to be, the names of `user`: (pipe to tell it, process).

    It stays outside, where root may name anybody.
    """
    told, tell = os.pipe()
    parent, mapper = os.getpid(), os.fork()
    if mapper == 0:
        code = 1
        try:
            os.close(tell)
            if os.read(told, 1) == b"1":
                for name in ("uid_map", "gid_map"):
                    Path(f"/proc/{parent}/{name}").write_text(f"{user} {user} 1")
                code = 0
        finally:
            os._exit(code)
    os.close(told)
    return tell, mapper


def give_up(
    *, limits: Mapping[int, int], calls: Calls, user: int | None, files: Mapping[str, int] | None = None
) -> tuple[str, ...]:
    """The last steps of a process that is to be held, in the one order that works; of `LANDLOCK`, `CALLS`, what fails.

    `limits`: RLIMIT -> value. `user`: whom a process of root's becomes, if it is still that and may; None: it stays
    what it is. `files`: what `landlock.confine` leaves; None: all that is in view.
    """
    bounds = {resource.RLIMIT_CORE: 0, resource.RLIMIT_MEMLOCK: MEMORY_LOCKED_BYTES, resource.RLIMIT_MSGQUEUE: 0}
    for limit, value in (bounds | dict(limits)).items():
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    missing = [] if files is None or landlock.confine(files) else [LANDLOCK]
    if user is not None and os.getuid() == 0:
        with contextlib.suppress(OSError):  # in a namespace that knows root alone
            become(user)
    _libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _libc.capset(header, (ctypes.c_uint32 * 6)())
    return (*missing, *([] if calls.give_up() else [CALLS]))


def close_all_but(kept: Iterable[int]) -> None:
    """All descriptors above 2 but these."""
    for begin, end in itertools.pairwise([2, *sorted(kept), os.sysconf("SC_OPEN_MAX")]):
        os.closerange(begin + 1, end)
