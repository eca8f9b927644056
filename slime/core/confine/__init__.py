"""Sandboxes processes that handle untrusted input: model-written programs, an agent's commands, graders.

A supervisor enters new namespaces without network access and switches to an unused user id (`leave`). It builds the
file system that its children see (`view.build`) and forks the children. In each child, `give_up` sets resource limits,
drops privileges, and blocks all other files, sockets and system calls with Landlock (`confine`) and seccomp (`Calls`).
While the children run, the supervisor polls their memory usage (`view.exceeds`).

Linux only. Uses only the standard library, because supervisors run without any installed packages.

Invariants
1. Neither a process nor its descendants can regain a right that the process gave up.
2. A process started by root switches to another user if possible, because the kernel does not limit root's number of
   processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import platform
import resource
import secrets
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

READ, ALL = 0b1101, -1
"""Landlock access rights. `READ`: execute, read files, list folders. `ALL`: every right."""
LIBRARIES = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime")
"""System files that Python needs."""
_RIGHTS_SINCE, _OF_FILES = {1: 13, 2: 14, 3: 15, 5: 16}, 0b1100000000000111
"""Landlock ABI version -> number of file system rights, and the mask of rights that apply to regular files."""
_libc = ctypes.CDLL(None, use_errno=True)
_SET_NO_NEW_PRIVS = 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446


def readable_libraries(more: Iterable[str] = ()) -> dict[str, int]:
    """Returns path -> `READ` for this Python installation, the system libraries and the paths in `more`."""
    return dict.fromkeys((*LIBRARIES, sys.prefix, sys.base_prefix, *more), READ)


def confine(allowed: Mapping[str, int]) -> bool:
    """Uses Landlock to restrict this process and its children to the `allowed` paths.

    Newer Landlock versions also deny TCP and signals to other processes. `allowed`: path -> rights (`READ` or `ALL`);
    missing paths are skipped. Returns False if the kernel has no Landlock (before Linux 5.13).
    """
    abi = _libc.syscall(_CREATE_RULESET, None, 0, 1)
    if abi < 1:
        return False
    rights = (1 << max(bits for since, bits in _RIGHTS_SINCE.items() if since <= abi)) - 1
    attributes = (ctypes.c_uint64 * 3)(rights, 0b11, 0b11)  # files; TCP bind and connect; abstract sockets and signals
    ruleset = _libc.syscall(_CREATE_RULESET, attributes, 24 if abi >= 6 else 16 if abi >= 4 else 8, 0)
    if ruleset < 0:
        return False
    for path, wanted in allowed.items():
        with contextlib.suppress(OSError):  # the path does not exist on this system
            descriptor = os.open(path, os.O_PATH)
            permitted = wanted & (rights if os.path.isdir(path) else rights & _OF_FILES)
            rule = permitted.to_bytes(8, sys.byteorder) + descriptor.to_bytes(4, sys.byteorder)
            _libc.syscall(_ADD_RULE, ruleset, 1, rule, 0)
            os.close(descriptor)
    _libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return bool(_libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0)


# The system call filter (seccomp(2)) is a classic BPF program. It sees the system call number and register arguments,
# but not memory. Calls that pass arguments in memory (`clone3`, io_uring) fail with ENOSYS, so libraries fall back to
# older calls. Supports x86-64 and aarch64. A call with any other architecture's calling convention kills the process.

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine -> (column in `_TABLE`, AUDIT_ARCH value)."""
_X32 = 0x40000000
_TABLE = """
clone 56 220, fork 57 -1, vfork 58 -1, execve 59 221, execveat 322 281, socket 41 198, socketpair 53 199,
ioctl 16 29, fcntl 72 25, setsockopt 54 208, kill 62 129, tkill 200 130, tgkill 234 131, rt_sigqueueinfo 129 138,
rt_tgsigqueueinfo 297 240, prlimit64 302 261, sched_setaffinity 203 122, sched_setscheduler 144 119,
sched_setparam 142 118, sched_setattr 314 274, setpriority 141 140, ioprio_set 251 30, shmget 29 194, shmctl 31 195,
shmat 30 196, msgget 68 186, semget 64 190, mq_open 240 180, memfd_create 319 279, add_key 248 217,
request_key 249 218, keyctl 250 219, unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41,
chroot 161 51, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, ptrace 101 117, process_vm_readv 310 270,
process_vm_writev 311 271, kcmp 312 272, vmsplice 278 75, io_setup 206 0, inotify_init 253 -1, inotify_init1 294 26,
migrate_pages 256 238, move_pages 279 239, open_by_handle_at 304 265, name_to_handle_at 303 264,
fanotify_init 300 262, lookup_dcookie 212 18, quotactl 179 60, nfsservctl 180 42, kexec_load 246 104,
kexec_file_load 320 294, init_module 175 105, finit_module 313 273, delete_module 176 106, reboot 169 142,
swapon 167 224, swapoff 168 225, syslog 103 116, acct 163 89, settimeofday 164 170, clock_settime 227 112,
clock_adjtime 305 266, adjtimex 159 171, sethostname 170 161, setdomainname 171 162, vhangup 153 58,
modify_ldt 154 -1, chmod 90 -1, fchmod 91 52, fchmodat 268 53, chown 92 -1, fchown 93 55, lchown 94 -1,
fchownat 260 54, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, utime 132 -1, utimes 235 -1, futimesat 261 -1,
utimensat 280 88, iopl 172 -1, ioperm 173 -1
"""
"""System call name, x86-64 number, aarch64 number (-1: does not exist)."""
_SAME = """
pidfd_getfd 438, pidfd_send_signal 424, open_tree 428, move_mount 429, fsopen 430, fsconfig 431, fsmount 432,
fspick 433, mount_setattr 442, quotactl_fd 443, open_tree_attr 467, io_uring_setup 425, io_uring_enter 426,
io_uring_register 427, clone3 435, memfd_secret 447, process_madvise 440, process_mrelease 448, fchmodat2 452,
setxattrat 463, landlock_create_ruleset 444, landlock_add_rule 445, landlock_restrict_self 446, file_setattr 469
"""
"""System call name, number on both architectures."""
_NUMBERS = {name: (int(x86), int(arm)) for name, x86, arm in map(str.split, _TABLE.split(","))}
_NUMBERS |= {name: (int(number), int(number)) for name, number in map(str.split, _SAME.split(","))}


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_NAMESPACES = _words("""
unshare setns mount umount2 pivot_root chroot open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr
open_tree_attr
""")
_LOOKED_AT = _words("clone clone3 fork vfork execve execveat socket socketpair ioctl fcntl setsockopt")
_PROGRAMS = _words("fork vfork execve execveat")
_FILES = _words("""
chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat file_setattr
""")
_ATTRIBUTES = _words("setxattr lsetxattr fsetxattr setxattrat")
"""Blocked with EOPNOTSUPP, because a tmpfs does not count extended attributes towards its size limit."""
_LANDLOCK = _words("landlock_create_ruleset landlock_add_rule landlock_restrict_self")
"""Blocked, because Landlock rules use unlimited memory and a confined process does not need them."""
_OWN_PACE = _words("sched_setaffinity sched_setscheduler sched_setparam sched_setattr setpriority ioprio_set")
_WATCHES = _words("inotify_init inotify_init1")
_KILLS = _words("kill tgkill rt_sigqueueinfo rt_tgsigqueueinfo")
_OF_PROCESSES = _words("prlimit64 sched_setaffinity sched_setscheduler sched_setparam sched_setattr")
_OF_MANY = _words("tkill pidfd_send_signal setpriority ioprio_set")
"""Calls that affect other processes. `_KILLS` and `_OF_PROCESSES` take a pid as first argument (for `_OF_PROCESSES`, 0
means the caller). `_OF_MANY` identify processes in other ways."""
_MISSING = _words("io_uring_setup io_uring_enter io_uring_register memfd_create memfd_secret io_setup") + _LANDLOCK
"""Blocked with ENOSYS, so that programs fall back to other calls."""
_CLONE_NEW, _CLONE_THREAD = 0x7E020000, 0x00010000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_SET_PIPE_SIZE, _SET_OWNER, _SET_OWNER_EX = 1031, 8, 15
_SET_OWNER_BY_IOCTL = (0x8901, 0x8902)
"""ioctl requests (FIOSETOWN, SIOCSPGRP) that select which process is signalled when a file becomes ready."""
_SOL_SOCKET, _BUFFER_SIZES = 1, (7, 8, 32, 33)
_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
_PROTOCOLS = (0, 6, 17)
"""Allowed protocols of internet sockets: default, TCP, UDP."""
_STREAM, _SEQPACKET = 1, 5
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_PR_GET_SECCOMP = 21
_SECCOMP, _SET_MODE_FILTER, _ALL_THREADS = (317, 277), 1, 1


@dataclass(frozen=True, slots=True)
class Calls:
    """The system calls that remain available to a process and its children.

    Buffer sizes of pipes and sockets cannot be changed, because no resource limit counts their memory. A process cannot
    change the resource limits of another process, which could be its supervisor.
    """

    internet: bool = False
    """Allow TCP and UDP sockets, and netlink sockets for listing network devices."""
    unix: bool = False
    """Allow Unix sockets with a path or name. If False, only connected socket pairs are allowed. File watches and
    changes to CPU affinity or priority, which a program could use to slow itself down, are blocked too."""
    programs: bool = True
    """Allow starting and signalling other processes, and changing owners, modes and timestamps of files, which Landlock
    does not restrict. If False, only threads are allowed."""
    namespaces: bool = False
    """Allow creating namespaces and mounts, for a process that will confine other processes."""

    @staticmethod
    def available() -> bool:
        state = _libc.prctl(_PR_GET_SECCOMP, 0, 0, 0, 0)
        return platform.machine() in _ARCHITECTURES and sys.byteorder == "little" and state >= 0

    def give_up(self) -> bool:
        """Installs the filter. Returns False if the kernel does not support it."""
        if not self.available():
            return False
        filters = self._filters()
        code = ctypes.create_string_buffer(b"".join(filters))
        program = _Program(len(filters), ctypes.addressof(code))
        _libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        seccomp = _SECCOMP[_ARCHITECTURES[platform.machine()][0]]
        return bool(_libc.syscall(seccomp, _SET_MODE_FILTER, _ALL_THREADS, ctypes.byref(program)) == 0)

    def _filters(self) -> list[bytes]:
        column, architecture = _ARCHITECTURES[platform.machine()]
        program = [_step(_LOAD, _ARCHITECTURE), _step(_EQUAL, architecture, 1, 0), _step(_RETURN, _KILL)]
        program += [_step(_LOAD, _NUMBER), _step(_AT_LEAST, _X32, 0, 1), _refuse(errno.ENOSYS)]
        for name, answer in self._answers():
            number = _NUMBERS[name][column]
            program += [_step(_EQUAL, number, 0, len(answer)), *answer] if number >= 0 else []
        return [*program, _step(_RETURN, _ALLOW)]

    def _answers(self) -> Iterator[tuple[str, list[bytes]]]:
        """Yields (system call, filter instructions that decide on it)."""
        kept = {*_LOOKED_AT, *_KILLS, *_OF_PROCESSES, *(_NAMESPACES if self.namespaces else ())}
        kept |= {*_FILES, *_OF_MANY} if self.programs else set()
        kept |= {*_LANDLOCK} if self.namespaces else set()
        kept |= {*_WATCHES} if self.unix else set()
        kept -= set() if self.unix or self.namespaces else {*_OWN_PACE}
        for name in _NUMBERS.keys() - kept:
            as_missing = errno.EOPNOTSUPP if name in _ATTRIBUTES else errno.ENOSYS if name in _MISSING else None
            yield name, [_refuse(as_missing or errno.EPERM)]
        yield "socket", self._socket()
        yield "socketpair", self._socketpair()
        terminal = _one_of(
            (_TIOCSTI, _TIOCLINUX, *(() if self.programs else _SET_OWNER_BY_IOCTL)), [_refuse(errno.EPERM)]
        )
        yield "ioctl", [_argument(1), *terminal, _step(_RETURN, _ALLOW)]
        refused = (_SET_PIPE_SIZE,) if self.programs else (_SET_PIPE_SIZE, _SET_OWNER, _SET_OWNER_EX)
        yield "fcntl", [_argument(1), *_one_of(refused, [_refuse(errno.EPERM)]), _step(_RETURN, _ALLOW)]
        of_buffers = [_argument(2), *_one_of(_BUFFER_SIZES, [_refuse(0)]), _step(_RETURN, _ALLOW)]
        yield "setsockopt", [_argument(1), *_one_of((_SOL_SOCKET,), of_buffers), _step(_RETURN, _ALLOW)]
        if not self.namespaces or not self.programs:
            yield "clone3", [_refuse(errno.ENOSYS)]
            of_new = [] if self.namespaces else [_step(_ANY_BIT, _CLONE_NEW, 0, 1), _refuse(errno.EPERM)]
            of_all = [] if self.programs else [_step(_ANY_BIT, _CLONE_THREAD, 1, 0), _refuse(errno.EPERM)]
            yield "clone", [_argument(0), *of_new, *of_all, _step(_RETURN, _ALLOW)]
        if self.programs:
            allowed = [*_one_of((0,), [_step(_RETURN, _ALLOW)]), _argument(2), _step(_EQUAL, 0, 0, 3)]
            allowed += [
                _argument(2, upper=True),
                _step(_EQUAL, 0, 0, 1),
                _step(_RETURN, _ALLOW),
            ]  # allow calls that only read limits
            yield "prlimit64", [_argument(0), *allowed, _refuse(errno.EPERM)]
            return
        for name in _PROGRAMS:
            yield name, [_refuse(errno.EPERM)]
        for names, own in ((_KILLS, (os.getpid(),)), (_OF_PROCESSES, (0, os.getpid()))):
            for name in names:
                yield name, [_argument(0), *_one_of(own, [_step(_RETURN, _ALLOW)]), _refuse(errno.EPERM)]

    def _socket(self) -> list[bytes]:
        answer = [_argument(0)]
        if self.unix:
            answer += _one_of((_UNIX,), [_step(_RETURN, _ALLOW)])
        if self.internet:
            allowed = [*_one_of(_PROTOCOLS, [_step(_RETURN, _ALLOW)]), _refuse(errno.EPROTONOSUPPORT)]
            answer += _one_of((_INET, _INET6), [_argument(2), *allowed])
            of_route = [*_one_of((0,), [_step(_RETURN, _ALLOW)]), _refuse(errno.EPROTONOSUPPORT)]
            answer += _one_of((_NETLINK,), [_argument(2), *of_route])
        return [*answer, _refuse(errno.EAFNOSUPPORT)]

    def _socketpair(self) -> list[bytes]:
        """Unless `unix` is set, blocks datagram pairs, because they can also send to a socket path."""
        answer = [_argument(0), _step(_EQUAL, _UNIX, 1, 0), _refuse(errno.EAFNOSUPPORT)]
        if not self.unix:
            kinds = _one_of((_STREAM, _SEQPACKET), [_step(_RETURN, _ALLOW)])
            answer += [_argument(1), _step(_AND, 0xF), *kinds, _refuse(errno.EAFNOSUPPORT)]
        return [*answer, _step(_RETURN, _ALLOW)]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filters", ctypes.c_void_p))


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _refuse(number: int) -> bytes:
    return _step(_RETURN, _ERROR | number)


def _argument(number: int, *, upper: bool = False) -> bytes:
    """Loads the lower or upper 32 bits of an argument. The kernel ignores the upper half of an int."""
    return _step(_LOAD, _ARGUMENTS + 8 * number + 4 * upper)


def _one_of(values: tuple[int, ...], then: list[bytes]) -> list[bytes]:
    """Executes `then` if the loaded value is one of `values`. `then` must end with a return."""
    tests = [_step(_EQUAL, value, len(values) - i - 1, 0) for i, value in enumerate(values)]
    tests[-1] = _step(_EQUAL, values[-1], 0, len(then))
    return list(itertools.chain(tests, then))


FIRST_USER, NUM_USERS = 1_000_000_000, 1_000_000_000
"""Range of user ids that are not normally assigned."""
NEW_MOUNTS, NEW_NAMES, NEW_IPC = 0x00020000, 0x04000000, 0x08000000
NEW_USER, NEW_PROCESSES, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
LANDLOCK, CALLS = "Landlock", "seccomp"
MEMORY_LOCKED_BYTES = 1 << 16
_SET_DUMPABLE = 4
_CAPABILITY_VERSION_3 = 0x20080522


def any_user() -> int:
    """Returns a random, unused uid, which also serves as gid."""
    return FIRST_USER + secrets.randbelow(NUM_USERS)


def become(user: int) -> None:
    """Switches this process from root to `user`."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def show_own_files() -> None:
    """Restores this process's access to its own files in /proc, which it loses when it changes its user."""
    _libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0)


def leave(namespaces: int, user: int | None = None, *, keep: Iterable[str] = ()) -> dict[str, int] | None:
    """Moves this single-threaded process into new namespaces. Returns None if that is not permitted.

    Unprivileged processes need a new user namespace, which some kernels and containers forbid. `user`: if possible, a
    root process switches to this user and keeps its capabilities inside the namespaces. `keep`: files and folders for a
    `view`. Returns an open descriptor for each of them, because the new user might not be able to access the paths.
    Raises `OSError` if one is missing.
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
            with contextlib.suppress(OSError):  # capabilities do not depend on id maps
                Path("/proc/self", name).write_text(text)
    return kept if whole else None


def _start_mapper(user: int) -> tuple[int, int]:
    """Forks a process that maps `user` into the caller's future user namespace. Returns (pipe that starts it, its pid).

    The forked process stays outside that namespace, because only there can root map arbitrary ids.
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
    """Performs the last confinement steps in the only order that works. Returns those that failed (`LANDLOCK`,
    `CALLS`).

    `limits`: RLIMIT -> value. `user`: a root process switches to this user if possible; None: no change. `files`: path
    -> rights for `confine`; None: do not use Landlock.
    """
    bounds = {resource.RLIMIT_CORE: 0, resource.RLIMIT_MEMLOCK: MEMORY_LOCKED_BYTES, resource.RLIMIT_MSGQUEUE: 0}
    for limit, value in (bounds | dict(limits)).items():
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    missing = [] if files is None or confine(files) else [LANDLOCK]
    if user is not None and os.getuid() == 0:
        with contextlib.suppress(OSError):  # fails if the namespace maps only root
            become(user)
    _libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _libc.capset(header, (ctypes.c_uint32 * 6)())
    return (*missing, *([] if calls.give_up() else [CALLS]))


def close_all_but(kept: Iterable[int]) -> None:
    """Closes all file descriptors above 2 that are not in `kept`."""
    for begin, end in itertools.pairwise([2, *sorted(kept), os.sysconf("SC_OPEN_MAX")]):
        os.closerange(begin + 1, end)
