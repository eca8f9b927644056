"""System calls that a process gives up for good, by a filter of the kernel (seccomp). Standard library only.

The filter is a program of classic BPF (seccomp(2)): it looks at the number of a call and its arguments in registers,
never at memory. Calls whose meaning stands in memory are refused as a kernel without them does (`clone3`, io_uring), so
that libraries take the older ones. x86-64 and aarch64; a call by the tables of another architecture ends the process.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import platform
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine -> column below, and its name in the kernel."""
_X32 = 0x40000000
_SAME = {
    "pidfd_getfd": 438,
    "pidfd_send_signal": 424,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "open_tree_attr": 467,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "clone3": 435,
    "memfd_secret": 447,
    "process_madvise": 440,
    "process_mrelease": 448,
    "fchmodat2": 452,
    "setxattrat": 463,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
    "file_setattr": 469,
}
_NUMBERS: dict[str, tuple[int, int]] = {
    "clone": (56, 220),
    "fork": (57, -1),
    "vfork": (58, -1),
    "execve": (59, 221),
    "execveat": (322, 281),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "ioctl": (16, 29),
    "fcntl": (72, 25),
    "setsockopt": (54, 208),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "shmget": (29, 194),
    "shmctl": (31, 195),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "vmsplice": (278, 75),
    "io_setup": (206, 0),
    "inotify_init": (253, -1),
    "inotify_init1": (294, 26),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18),
    "quotactl": (179, 60),
    "nfsservctl": (180, 42),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "syslog": (103, 116),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "modify_ldt": (154, -1),
    "chmod": (90, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, -1),
    "fchown": (93, 55),
    "lchown": (94, -1),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "utime": (132, -1),
    "utimes": (235, -1),
    "futimesat": (261, -1),
    "utimensat": (280, 88),
    "iopl": (172, -1),
    "ioperm": (173, -1),
    **{name: (number, number) for name, number in _SAME.items()},
}
"""Name of a call -> its number on x86-64 and aarch64; -1 where there is none."""
_NAMESPACES: tuple[str, ...] = (
    "unshare",
    "setns",
    "mount",
    "umount2",
    "pivot_root",
    "chroot",
    "open_tree",
    "move_mount",
    "fsopen",
)
_NAMESPACES += ("fsconfig", "fsmount", "fspick", "mount_setattr", "open_tree_attr")
_LOOKED_AT: tuple[str, ...] = (
    "clone",
    "clone3",
    "fork",
    "vfork",
    "execve",
    "execveat",
    "socket",
    "socketpair",
    "ioctl",
    "fcntl",
)
_LOOKED_AT += ("setsockopt",)
_PROGRAMS = ("fork", "vfork", "execve", "execveat")
_FILES: tuple[str, ...] = (
    "chmod",
    "fchmod",
    "fchmodat",
    "fchmodat2",
    "chown",
    "fchown",
    "lchown",
    "fchownat",
    "utime",
    "utimes",
)
_FILES += ("futimesat", "utimensat", "file_setattr")
_ATTRIBUTES = ("setxattr", "lsetxattr", "fsetxattr", "setxattrat")
"""Refused as by a file system that has them not: lists of access rights of a file in memory are beyond its size."""
_LANDLOCK = ("landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self")
"""Rules are memory that nothing bounds. Who is held has his own already."""
_OWN_PACE = ("sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr", "setpriority", "ioprio_set")
_WATCHES = ("inotify_init", "inotify_init1")
_KILLS = ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
_OF_PROCESSES = ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr")
_OF_MANY = ("tkill", "pidfd_send_signal", "setpriority", "ioprio_set")
"""Calls on a process: the first argument of the first two kinds is its number, in the second 0 is the caller; the third
kind names processes in further ways."""
_MISSING: tuple[str, ...] = (
    "io_uring_setup",
    "io_uring_enter",
    "io_uring_register",
    "memfd_create",
    "memfd_secret",
    "io_setup",
)
_MISSING += _LANDLOCK
"""Refused as by a kernel that has them not: programs know how to go on."""
_CLONE_NEW, _CLONE_THREAD = 0x7E020000, 0x00010000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_SET_PIPE_SIZE, _SET_OWNER, _SET_OWNER_EX = 1031, 8, 15
_SET_OWNER_BY_IOCTL = (0x8901, 0x8902)
"""Whom a signal goes to when a file is ready."""
_SOL_SOCKET, _BUFFER_SIZES = 1, (7, 8, 32, 33)
_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
_PROTOCOLS = (0, 6, 17)
"""Of internet sockets: that of the type, TCP, UDP."""
_STREAM, _SEQPACKET = 1, 5
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_PR_GET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 21, 38
_SECCOMP, _SET_MODE_FILTER, _ALL_THREADS = (317, 277), 1, 1


@dataclass(frozen=True, slots=True)
class Calls:
    """What a process keeps of the calls that are given up. Its children have no more.

    Buffers of pipes and sockets keep the sizes that the kernel gives them, whoever asks: they are memory that no limit
    of a process counts. Nobody changes the limits of another process, who may be the one that holds it.
    """

    internet: bool = False
    """Sockets of TCP and UDP, and those that list the devices of the network."""
    unix: bool = False
    """Sockets that have a path or a name; without it connected pairs alone, no watches of files, and no choice of
    processors and priority: a program could make itself slow."""
    programs: bool = True
    """Other processes, to start and to signal, and changes of owners, rights and times of files, which Landlock does
    not see; without it threads alone."""
    namespaces: bool = False
    """Namespaces and mounts: for a process that is going to hold others."""

    @staticmethod
    def available() -> bool:
        """Whether this kernel and machine know such filters."""
        state = ctypes.CDLL(None, use_errno=True).prctl(_PR_GET_SECCOMP, 0, 0, 0, 0)
        return platform.machine() in _ARCHITECTURES and sys.byteorder == "little" and state >= 0

    def give_up(self) -> bool:
        """Gives up all that this does not keep. False where the kernel has no such filter."""
        if not self.available():
            return False
        filters = self._filters()
        code = ctypes.create_string_buffer(b"".join(filters))
        libc = ctypes.CDLL(None, use_errno=True)
        program = _Program(len(filters), ctypes.addressof(code))
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        seccomp = _SECCOMP[_ARCHITECTURES[platform.machine()][0]]
        return bool(libc.syscall(seccomp, _SET_MODE_FILTER, _ALL_THREADS, ctypes.byref(program)) == 0)

    def _filters(self) -> list[bytes]:
        """The program."""
        column, architecture = _ARCHITECTURES[platform.machine()]
        program = [_step(_LOAD, _ARCHITECTURE), _step(_EQUAL, architecture, 1, 0), _step(_RETURN, _KILL)]
        program += [_step(_LOAD, _NUMBER), _step(_AT_LEAST, _X32, 0, 1), _refuse(errno.ENOSYS)]
        for name, answer in self._answers():
            number = _NUMBERS[name][column]
            program += [_step(_EQUAL, number, 0, len(answer)), *answer] if number >= 0 else []
        return [*program, _step(_RETURN, _ALLOW)]

    def _answers(self) -> Iterator[tuple[str, list[bytes]]]:
        """(call, what the filter does on it)"""
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
            allowed += [_argument(2, upper=True), _step(_EQUAL, 0, 0, 1), _step(_RETURN, _ALLOW)]  # they are asked for
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
        """Datagrams of a pair can be sent to a path, too."""
        answer = [_argument(0), _step(_EQUAL, _UNIX, 1, 0), _refuse(errno.EAFNOSUPPORT)]
        if not self.unix:
            kinds = _one_of((_STREAM, _SEQPACKET), [_step(_RETURN, _ALLOW)])
            answer += [_argument(1), _step(_AND, 0xF), *kinds, _refuse(errno.EAFNOSUPPORT)]
        return [*answer, _step(_RETURN, _ALLOW)]


class _Program(ctypes.Structure):
    """What the kernel takes."""

    _fields_ = (("length", ctypes.c_ushort), ("filters", ctypes.c_void_p))


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _refuse(number: int) -> bytes:
    return _step(_RETURN, _ERROR | number)


def _argument(number: int, *, upper: bool = False) -> bytes:
    """Its lower half, which is all that the kernel takes of an int, or the other one."""
    return _step(_LOAD, _ARGUMENTS + 8 * number + 4 * upper)


def _one_of(values: tuple[int, ...], then: list[bytes]) -> list[bytes]:
    """`then`, which returns, if what was loaded is one of these."""
    tests = [_step(_EQUAL, value, len(values) - i - 1, 0) for i, value in enumerate(values)]
    tests[-1] = _step(_EQUAL, values[-1], 0, len(then))
    return list(itertools.chain(tests, then))
