"""The processes of a run and the addresses of their hosts: the run id that marks them, folders for their sockets,
children that must not outlive their parent, and network interfaces. Imports nothing heavy: it is asked before torch is.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import secrets
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from slime.core.errors import ConfigError

# Identifiers of a run: one id that names its folder, its processes (environment variable) and its temporary files.

RUN_ID_ENV = "SLIME_RUN_ID"
"""Set in every process that a run starts; the guardian finds what a dead driver left behind by it."""


def new_run_id() -> str:
    """A short id, unique in practice, sortable by time, safe in file names: `20260131-235959-1a2b3c`."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def scratch_prefix(kind: str = "") -> str:
    """How the name of every temporary folder begins: the guardian of the run removes it, should its maker be killed."""
    return f"slime-{os.environ.get(RUN_ID_ENV, 'no-run')}-{kind}"


# Temporary folders that hold Unix sockets.

SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket (`sun_path` of Linux without the byte that ends it)."""
SHORT_ROOM = "/tmp"
"""For sockets, where the temporary folder has too long a path."""
OF_LIBRARIES = "torch-shm-dir-XXXXXX/manager.sock"
"""The longest name of what torch, Python's multiprocessing and SGLang put into their temporary folder."""
OF_RAY = "r/session_2026-01-31_23-59-59_123456_1234567/sockets/plasma_store"


def longest_room(below: str) -> int:
    """Bytes that the path of a folder may have, so that a socket at the path `below` in it fits."""
    return SOCKET_PATH_BYTES - len(os.fsencode(f"/{below}"))


def socket_room(below: str, *, given: str | None = None) -> str:
    """The folder for a temporary folder with sockets; `below`: the longest path that one may have there.

    The temporary folder (TMPDIR); where its path is too long, /tmp. `given`: RAY_TMPDIR, which alone will do then.
    Raises `ConfigError` if no folder will do.
    """
    most = longest_room(below)
    room = os.path.abspath(given) if given else tempfile.gettempdir()
    if len(os.fsencode(room)) <= most:
        return room
    if not given and os.access(SHORT_ROOM, os.W_OK | os.X_OK) and len(SHORT_ROOM) <= most:
        return SHORT_ROOM
    name, elsewhere = ("RAY_TMPDIR", "") if given else ("TMPDIR", f", and nothing can be written in {SHORT_ROOM}")
    raise ConfigError(f"{too_long(name, room, below)}{elsewhere}; name a folder of at most {most} characters")


def too_long(variable: str, room: str, below: str) -> str:
    """What is wrong with a folder for sockets."""
    return (
        f"got {variable} {room} of {len(os.fsencode(room))} characters; {below} is to be a socket there, whose path "
        f"may have {SOCKET_PATH_BYTES}"
    )


def ray_folder(run_id: str) -> Path:
    """What is around the files of a local Ray of the run, for its owner alone. Raises `ConfigError` (`socket_room`)."""
    name = f"slime-ray-{run_id.rpartition('-')[2]}"  # short: Ray adds 65 characters
    return Path(socket_room(f"{name}/{OF_RAY}", given=os.environ.get("RAY_TMPDIR")), name)


# A child process that must not outlive its parent. Standard library only; Linux only.

_PR_SET_PDEATHSIG = 1


def die_with_parent(expected_parent: int | None) -> None:
    """Asks the kernel for SIGKILL when the parent thread ends; exits at once if it has ended before.

    `expected_parent`: pid of the starter; None if unknown. Raises `OSError` if the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if expected_parent is not None and os.getppid() != expected_parent:
        os._exit(1)


# Addresses of hosts, and the network interfaces behind them. Imports nothing heavy: it is asked before torch is.

LOOPBACK = "127.0.0.1"
"""Where the processes of a run on one host meet."""
INTERFACE_ENVS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""What gloo and NCCL read: the interface of their sockets."""


def is_loopback(address: str) -> bool:
    """Whether only this host reaches `address` (an IP address or "localhost")."""
    ip = ip_of(address)
    return address == "localhost" if ip is None else ip.is_loopback


def ip_of(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a text is, with or without brackets and zone; None if it is none."""
    try:
        ip = ipaddress.ip_address(address.strip("[]").partition("%")[0])
    except ValueError:
        return None
    return (ip.ipv4_mapped or ip) if isinstance(ip, ipaddress.IPv6Address) else ip


def interface_of(address: str) -> str | None:
    """The interface of this host that has `address`; None if none has it."""
    import psutil

    wanted = ip_of(address)
    for name, entries in psutil.net_if_addrs().items():
        if wanted is not None and any(ip_of(entry.address) == wanted for entry in entries):
            return name
    return None


def interface_variables(address: str, given: Mapping[str, str]) -> dict[str, str]:
    """What to add to an environment, so that gloo and NCCL of a process on this host use the interface of `address`.

    Left to themselves both guess: gloo asks for the host's own name, which is often no address that others reach. On
    loopback gloo opens its sockets there; NCCL then moves its data by other means, and may choose. What is `given`
    (an environment) stays.
    """
    if is_loopback(address):
        wanted = {"GLOO_SOCKET_IFNAME": "lo"}
    else:
        name = interface_of(address)
        wanted = dict.fromkeys(INTERFACE_ENVS, name) if name else {}
    return {variable: name for variable, name in wanted.items() if variable not in given}


def server_url(text: str) -> str:
    """`http://host:port` of HOST:PORT, with or without the scheme. Raises `ConfigError` for anything else."""
    given = text.strip()
    try:
        parts = urlsplit(given if "://" in given else f"http://{given}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    more = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    if not host or not port or more or parts.scheme != "http":
        raise ConfigError(f"got {text!r}, which is not the address of a server; give HOST:PORT, over plain HTTP")
    return http_url(host, port)


def http_url(host: str, port: int) -> str:
    """`http://host:port`; an IPv6 address stands in brackets."""
    return f"http://{host_port(host, port)}"


def host_port(host: str, port: int) -> str:
    """HOST:PORT; an IPv6 address stands in brackets."""
    return f"{in_brackets(host)}:{port}"


def in_brackets(host: str) -> str:
    """A host as it stands before a port."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def host_of(url: str) -> str:
    """The host of what `server_url` gives."""
    return str(urlsplit(url).hostname)


def address_towards(host: str) -> str:
    """The address of this host by which `host` can reach it. Sends nothing. Raises `OSError` if there is no way."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
