"""The file system of a confined process: a private root with read-only system programs and libraries.

A process in a new mount namespace builds the view once (`build`). Each confined process then enters it (`enter`) in its
own mount namespace. Writable folders are size-limited tmpfs mounts that disappear with the namespace. Nothing else from
the host is visible, including other programs' sockets.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import socket
import struct
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin")
ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "ssl/certs")
DEVICES = ("null", "zero", "full", "random", "urandom")
SHOWN_OF_PROC = frozenset(("cpuinfo", "filesystems", "loadavg", "meminfo", "mounts", "net", "self", "stat", "sys"))
SHOWN_OF_PROC |= {"thread-self", "uptime", "version", "vmstat"}
"""Entries of /proc, besides processes, that stay visible. All others, such as the kernel's `cmdline`, appear empty."""
SMALLER = MappingProxyType(
    {
        "user/max_inotify_instances": "16",
        "net/ipv4/tcp_rmem": "4096 65536 131072",
        "net/ipv4/tcp_wmem": "4096 65536 131072",
    }
)
"""Setting in /proc/sys -> value inside the namespaces. Limits queues and buffers."""
_BIND, _REC, _PRIVATE, _NOSUID, _NODEV, _NOEXEC, _READ_ONLY = 0x1000, 0x4000, 0x40000, 2, 4, 8, 1
_DETACH, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_SETATTR = 2, -100, 0x8000, 442
_libc = ctypes.CDLL(None, use_errno=True)


def outermost(paths: Iterable[str]) -> list[str]:
    """Returns the existing paths and their resolved paths, without those inside another path or inside `SYSTEM`."""
    found = {name for path in paths if os.path.exists(path) for name in (path, os.path.realpath(path))}
    kept: list[str] = []
    for path in sorted(found, key=len):
        kept += [] if any(Path(path).is_relative_to(other) for other in (*SYSTEM, *kept)) else [path]
    return kept


def build(
    root: str,
    *,
    readable: Mapping[str, int],
    places: Mapping[str, tuple[int, int] | None],
    texts: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Builds the view in the folder `root`. Raises `OSError` with the name of the failed step.

    `readable`: path -> descriptor from `confine.leave`; mounted at the same path. `places`: folder -> arguments for
    `writable`, or None for an empty folder. `texts`: file name in /etc -> content.
    """
    mount("none", "/", None, _REC | _PRIVATE)
    mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    for path in SYSTEM:
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        elif os.path.exists(path):
            show(path, root + path)
    for name in ETC:
        if os.path.exists(f"/etc/{name}"):
            show(f"/etc/{name}", f"{root}/etc/{name}")
    for name in DEVICES:
        show(f"/dev/{name}", f"{root}/dev/{name}")
    for name, text in texts.items():
        Path(root, "etc", name).write_text(text)
    for name, bounds in places.items():
        os.makedirs(f"{root}/{name}")
        if bounds is not None:
            writable(f"{root}/{name}", *bounds)
    for path, descriptor in readable.items():
        show(f"/proc/self/fd/{descriptor}", root + path)
        os.close(descriptor)


def show(source: str, target: str) -> None:
    """Bind-mounts a host file or folder read-only at `target`."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not os.path.exists(target):
            Path(target).touch()
    mount(source, target, None, _BIND | _REC)
    _set(target, _READ_ONLY | _NOSUID, recursive=True)


def writable(target: str, num_bytes: int, num_files: int) -> None:
    """Mounts an empty, writable tmpfs at `target`."""
    options = f"size={num_bytes},nr_inodes={num_files},mode=700"
    mount("tmpfs", target, "tmpfs", _NOSUID | _NODEV, options)


def show_processes(target: str) -> None:
    """Mounts /proc for this process's PID namespace, hiding entries that programs do not need."""
    mount("proc", target, "proc", _NOSUID | _NODEV | _NOEXEC)
    Path(target, "sys/user/max_user_namespaces").write_text("0")
    for name, value in SMALLER.items():
        with contextlib.suppress(OSError):  # the kernel does not have this setting
            Path(target, "sys", name).write_text(value)
    for name in os.listdir(target):
        if name.isdigit() or name in SHOWN_OF_PROC:
            continue
        path = f"{target}/{name}"
        if os.path.isdir(path):
            mount("tmpfs", path, "tmpfs", _READ_ONLY | _NOSUID | _NODEV | _NOEXEC, "size=0,nr_inodes=2")
        elif not os.path.islink(path):
            mount("/dev/null", path, None, _BIND)


def enter(root: str) -> None:
    """Makes the view the read-only root file system of this mount namespace."""
    os.chdir(root)
    _must("pivot_root", _libc.pivot_root(b".", b"."))
    _must("pivot_root", _libc.umount2(b".", _DETACH))
    os.chdir("/")
    _set("/", _READ_ONLY, recursive=False)


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    given = [None if v is None else v.encode() for v in (source, target, kind, data)]
    what = "a private /proc" if kind == "proc" else f"mount namespace: {source}"
    _must(what, _libc.mount(given[0], given[1], given[2], flags, given[3]))


def _set(path: str, attributes: int, *, recursive: bool) -> None:
    packed = struct.pack("QQQQ", attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    _must(f"mount_setattr: {path}", _libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, packed, len(packed)))


def _must(what: str, status: int) -> None:
    if status != 0:
        raise OSError(f"{what} ({os.strerror(ctypes.get_errno())})")


# Memory of a process tree. Without a cgroup, the kernel can only limit individual processes, so the supervisor measures
# the tree.
#
# The total includes private memory (resident or swapped) and shared memory, but not file mappings. The cheap first
# check sums the resident memory of each process. If that exceeds the limit, the second check uses proportional shares
# (PSS), which count shared pages only once. The kernel does not report memory used by sockets and pipes, so their
# number is limited as if all buffers were full.

_OF_STATUS = ("RssAnon", "RssShmem", "HugetlbPages", "VmSwap")
_OF_MAPS = ("Pss_Anon", "Pss_Shmem", "SwapPss", "Private_Hugetlb", "Shared_Hugetlb")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def threads_of(pid: int) -> list[int]:
    """Returns a process's thread ids, the main thread first, even if it has exited. Empty if the process is gone."""
    try:
        return sorted(map(int, os.listdir(f"/proc/{pid}/task")), key=lambda thread: thread != pid)
    except OSError:
        return []


def children_of(pid: int) -> list[int]:
    """Returns the pids of a process's children. Empty if the process is gone."""
    found: list[int] = []
    for thread in threads_of(pid):
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def descendants_of(pids: Iterable[int]) -> list[int]:
    found, left = [], list(pids)
    while left:
        children = children_of(left.pop())
        found += children
        left += children
    return found


def lives(pid: int) -> bool:
    """Returns whether any thread of the process is still alive. If not, the process is gone or a zombie."""
    return any(fields_of(thread).get("State", "Z")[0] not in "ZX" for thread in threads_of(pid))


def fields_of(pid: int) -> dict[str, str]:
    """Returns the fields of /proc/PID/status for a process or thread. Empty if it is gone."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}


def processor_with_children_s(pids: Iterable[int]) -> float:
    """Returns the CPU time of these processes and their reaped children, in seconds."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / _TICKS_PER_S


def exceeds(pids: Collection[int], most_bytes: int) -> bool:
    """Returns whether the processes together use more than `most_bytes`, or would with full socket and pipe buffers."""
    if sum(map(_mapped_bytes, pids)) > most_bytes and sum(map(_share_bytes, pids)) > most_bytes:
        return True
    most_open = most_bytes // _buffer_bytes()
    return sum(len(_open_of(pid)) for pid in pids) > most_open and len(_buffers(pids)) > most_open


@functools.cache
def _buffer_bytes() -> int:
    """Returns the default socket buffer size. Pipe buffers are smaller. Confined processes cannot change either."""
    one, other = socket.socketpair()
    with one, other:
        return one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def _open_of(pid: int) -> list[str]:
    """Returns the /proc paths of the process's open file descriptors, read via a live thread."""
    for thread in threads_of(pid):
        with contextlib.suppress(OSError):
            if names := os.listdir(f"/proc/{thread}/fd"):
                return [f"/proc/{thread}/fd/{name}" for name in names]
    return []


def _buffers(pids: Iterable[int]) -> set[str]:
    """Returns the distinct sockets and pipes of the processes, as named by the kernel."""
    found = set()
    for pid in pids:
        for name in _open_of(pid):
            with contextlib.suppress(OSError):
                found.add(os.readlink(name))
    return {name for name in found if name.startswith(("socket:", "pipe:"))}


def _with_memory(pid: int) -> tuple[int, dict[str, str]]:
    """Returns (id of a live thread, its status). The kernel does not report memory for an exited thread."""
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
    """Returns the process's proportional memory share (PSS), or its mapped memory if the kernel does not report PSS."""
    try:
        lines = Path(f"/proc/{_with_memory(pid)[0]}/smaps_rollup").read_text().splitlines()
    except OSError:
        return _mapped_bytes(pid)
    fields = dict(line.split(":", 1) for line in lines[1:])
    return _sum_kib(fields.get(name, "0 kB") for name in _OF_MAPS) if "Pss_Anon" in fields else _mapped_bytes(pid)


def _sum_kib(sizes: Iterable[str]) -> int:
    return sum(1024 * int(size.split()[0]) for size in sizes)
