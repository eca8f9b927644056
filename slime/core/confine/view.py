"""What a held process sees of the file system: a root of its own, with the system's programs and libraries to read.

`build` makes it in a mount namespace that has been left, once; each process enters it (`enter`) in a mount namespace of
its own, with places to write that are memory, bounded, and gone with the namespace. Nothing of the outside but what is
named is in it, no socket of another program either.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin")
ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "ssl/certs")
DEVICES = ("null", "zero", "full", "random", "urandom")
SHOWN_OF_PROC = frozenset(("cpuinfo", "filesystems", "loadavg", "meminfo", "mounts", "net", "self", "stat", "sys"))
SHOWN_OF_PROC |= {"thread-self", "uptime", "version", "vmstat"}
"""Beside processes; all else of /proc (the kernel's command line, its keys and symbols) is empty."""
SMALLER = MappingProxyType(
    {
        "user/max_inotify_instances": "16",
        "net/ipv4/tcp_rmem": "4096 65536 131072",
        "net/ipv4/tcp_wmem": "4096 65536 131072",
    }
)
"""Setting of the namespaces, below /proc/sys -> its value here: of queues and buffers that grow by themselves."""
_BIND, _REC, _PRIVATE, _NOSUID, _NODEV, _NOEXEC, _READ_ONLY = 0x1000, 0x4000, 0x40000, 2, 4, 8, 1
_DETACH, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_SETATTR = 2, -100, 0x8000, 442
_libc = ctypes.CDLL(None, use_errno=True)


def outermost(paths: Iterable[str]) -> list[str]:
    """Those that are there, by all of their names, without what is inside of others or of `SYSTEM`."""
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
    """Makes the view in the folder `root`. Raises `OSError` with the name of the step that failed.

    `readable`: path -> descriptor, as `confine.leave` gives them, shown at the same paths; `places`: folder -> what
    `writable` takes, None for one that is left empty; `texts`: name of a file of /etc -> content.
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
    """A file or folder of the outside, to be read only."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not os.path.exists(target):
            Path(target).touch()
    mount(source, target, None, _BIND | _REC)
    _set(target, _READ_ONLY | _NOSUID, recursive=True)


def writable(target: str, num_bytes: int, num_files: int) -> None:
    """An empty place in memory, of so many bytes and files."""
    options = f"size={num_bytes},nr_inodes={num_files},mode=700"
    mount("tmpfs", target, "tmpfs", _NOSUID | _NODEV, options)


def show_processes(target: str) -> None:
    """/proc of the namespace of processes that this one is the first of, with what programs need of it."""
    mount("proc", target, "proc", _NOSUID | _NODEV | _NOEXEC)
    Path(target, "sys/user/max_user_namespaces").write_text("0")
    for name, value in SMALLER.items():
        with contextlib.suppress(OSError):  # a kernel without it
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
    """Makes the view the root of all processes of this mount namespace, to be read only."""
    os.chdir(root)
    _must("pivot_root", _libc.pivot_root(b".", b"."))
    _must("pivot_root", _libc.umount2(b".", _DETACH))
    os.chdir("/")
    _set("/", _READ_ONLY, recursive=False)


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    given = [None if v is None else v.encode() for v in (source, target, kind, data)]
    what = "a /proc of its own" if kind == "proc" else f"mount namespace: {source}"
    _must(what, _libc.mount(given[0], given[1], given[2], flags, given[3]))


def _set(path: str, attributes: int, *, recursive: bool) -> None:
    packed = struct.pack("QQQQ", attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    _must(f"mount_setattr: {path}", _libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, packed, len(packed)))


def _must(what: str, status: int) -> None:
    """Raises `OSError` with the name of a step that failed."""
    if status != 0:
        raise OSError(f"{what} ({os.strerror(ctypes.get_errno())})")
