"""Landlock: a process that gives up files, TCP, sockets with names and signals for good. Linux since 5.13."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterable, Mapping

READ, ALL = 0b1101, -1
"""Rights to a path: execute, read a file, list a folder; and all that there are."""
LIBRARIES = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime")
"""Where a system keeps what Python needs to run."""
_RIGHTS_SINCE, _OF_FILES = {1: 13, 2: 14, 3: 15, 5: 16}, 0b1100000000000111
"""Number of file rights since a version of its interface; the rights that a plain file can have."""
_NO_NEW_PRIVILEGES = 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446


def readable_libraries(more: Iterable[str] = ()) -> dict[str, int]:
    """Paths -> rights of this Python and its system, and of `more`."""
    return dict.fromkeys((*LIBRARIES, sys.prefix, sys.base_prefix, *more), READ)


def confine(allowed: Mapping[str, int]) -> bool:
    """This process and its children use files below these paths alone, no TCP, and signal nobody else. False without.

    `allowed`: path -> rights (`READ`, `ALL`); a path that is not there is left out.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    abi = libc.syscall(_CREATE_RULESET, None, 0, 1)
    if abi < 1:
        return False
    rights = (1 << max(bits for since, bits in _RIGHTS_SINCE.items() if since <= abi)) - 1
    attributes = (ctypes.c_uint64 * 3)(rights, 0b11, 0b11)  # files; TCP bind and connect; abstract sockets and signals
    ruleset = libc.syscall(_CREATE_RULESET, attributes, 24 if abi >= 6 else 16 if abi >= 4 else 8, 0)
    if ruleset < 0:
        return False
    for path, wanted in allowed.items():
        with contextlib.suppress(OSError):  # a system without such a file
            descriptor = os.open(path, os.O_PATH)
            permitted = wanted & (rights if os.path.isdir(path) else rights & _OF_FILES)
            rule = permitted.to_bytes(8, sys.byteorder) + descriptor.to_bytes(4, sys.byteorder)
            libc.syscall(_ADD_RULE, ruleset, 1, rule, 0)
            os.close(descriptor)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    return bool(libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0)
