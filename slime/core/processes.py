"""Run ids, socket folders, parent-death signals, network addresses. Must be cheap to import before torch is loaded."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import secrets
import signal
import socket
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from slime.core.errors import ConfigError

RUN_ID_ENV = "SLIME_RUN_ID"
"""Environment variable set in all processes of a run, so the guardian can find those that a dead driver left behind."""


def new_run_id() -> str:
    """Returns a short, practically unique id that sorts by time and is safe in file names: `20260131-235959-1a2b3c`."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


_THIS_PROCESS = f"process-{uuid.uuid4().hex}"


def this_sender() -> str:
    """Returns the sender name that this process uses for engine weight updates: the run id, or else a process id."""
    return os.environ.get(RUN_ID_ENV) or _THIS_PROCESS


def scratch_prefix(kind: str = "") -> str:
    """Returns the name prefix of temporary folders. The guardian uses it to remove the folders of killed processes."""
    return f"slime-{os.environ.get(RUN_ID_ENV, 'no-run')}-{kind}"


SOCKET_PATH_BYTES = 107
"""Maximum length of a Unix socket path: Linux's `sun_path` without the terminating null byte."""
SHORTER = "choose a folder whose path is at most {} characters long"
"""Advice for a folder whose path is too long for sockets. Format it with `longest_room`."""
SHORT_ROOM = "/tmp"
"""Fallback folder for sockets if the path of the temporary folder is too long."""
OF_LIBRARIES = "torch-shm-dir-XXXXXX/manager.sock"
"""Longest socket path that torch, multiprocessing or SGLang create inside their temporary folder."""
OF_RAY = "r/session_2026-01-31_23-59-59_123456_1234567/sockets/plasma_store"


def longest_room(below: str) -> int:
    """Returns the maximum path length in bytes of a folder that contains a socket at the relative path `below`."""
    return SOCKET_PATH_BYTES - len(os.fsencode(f"/{below}"))


def socket_room(below: str, *, given: str | None = None) -> str:
    """Returns the parent for temporary folders with sockets: TMPDIR, or /tmp if the path of TMPDIR is too long.

    `below`: longest socket path, relative to the parent. `given`: value of RAY_TMPDIR; if set, the only candidate.
    Raises `ConfigError` if all candidates are too long.
    """
    most = longest_room(below)
    room = os.path.abspath(given) if given else tempfile.gettempdir()
    if len(os.fsencode(room)) <= most:
        return room
    if not given and os.access(SHORT_ROOM, os.W_OK | os.X_OK) and len(SHORT_ROOM) <= most:
        return SHORT_ROOM
    name, elsewhere = ("RAY_TMPDIR", "") if given else ("TMPDIR", f", and {SHORT_ROOM} is not writable")
    raise ConfigError(f"{too_long(name, room, below)}{elsewhere}; {SHORTER.format(most)}")


def too_long(variable: str, room: str, below: str) -> str:
    return (
        f"{variable} {room} of {len(os.fsencode(room))} characters is too long: the path of its socket {below} may "
        f"have at most {SOCKET_PATH_BYTES} characters"
    )


def ray_folder(run_id: str) -> Path:
    """Returns the private temporary folder of the run's local Ray. Raises `ConfigError` like `socket_room`."""
    name = f"slime-ray-{run_id.rpartition('-')[2]}"  # short, because Ray appends 65 characters
    return Path(socket_room(f"{name}/{OF_RAY}", given=os.environ.get("RAY_TMPDIR")), name)


_PR_SET_PDEATHSIG = 1


def die_with_parent(expected_parent: int | None) -> None:
    """Makes Linux send SIGKILL to this process when the parent thread exits. Exits immediately if the parent is already
    gone.

    `expected_parent`: the parent's pid, or None if unknown. Raises `OSError` if the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if expected_parent is not None and os.getppid() != expected_parent:
        os._exit(1)


LOOPBACK = "127.0.0.1"
"""Address that the processes of a single-host run listen on."""
INTERFACE_ENVS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables that select the network interface of gloo and NCCL."""


def is_loopback(address: str) -> bool:
    """Returns whether `address` (an IP address or "localhost") is only reachable from this host."""
    ip = ip_of(address)
    return address == "localhost" if ip is None else ip.is_loopback


def ip_of(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parses an IP address with optional brackets and zone. Returns None if `address` is not an IP address."""
    try:
        ip = ipaddress.ip_address(address.strip("[]").partition("%")[0])
    except ValueError:
        return None
    return (ip.ipv4_mapped or ip) if isinstance(ip, ipaddress.IPv6Address) else ip


def interface_of(address: str) -> str | None:
    import psutil

    wanted = ip_of(address)
    for name, entries in psutil.net_if_addrs().items():
        if wanted is not None and any(ip_of(entry.address) == wanted for entry in entries):
            return name
    return None


def interface_variables(address: str, given: Mapping[str, str]) -> dict[str, str]:
    """Returns environment variables that make gloo and NCCL use the network interface of `address` on this host.

    Without them, both guess: gloo resolves the hostname, often to an address that other hosts cannot reach. On loopback
    only gloo needs an interface, because NCCL does not use sockets for data there. Omits variables already set in
    `given`.
    """
    if is_loopback(address):
        wanted = {"GLOO_SOCKET_IFNAME": "lo"}
    else:
        name = interface_of(address)
        wanted = dict.fromkeys(INTERFACE_ENVS, name) if name else {}
    return {variable: name for variable, name in wanted.items() if variable not in given}


def server_url(text: str) -> str:
    """Normalizes HOST:PORT or http://HOST:PORT to `http://host:port`. Raises `ConfigError` for anything else."""
    given = text.strip()
    try:
        parts = urlsplit(given if "://" in given else f"http://{given}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    more = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    if not host or not port or more or parts.scheme != "http":
        raise ConfigError(f"{text!r} is not a server address; use HOST:PORT (plain HTTP)")
    return http_url(host, port)


def http_url(host: str, port: int) -> str:
    """Returns `http://host:port`, with brackets around an IPv6 address."""
    return f"http://{host_port(host, port)}"


def host_port(host: str, port: int) -> str:
    """Returns `host:port`, with brackets around an IPv6 address."""
    return f"{in_brackets(host)}:{port}"


def in_brackets(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def host_of(url: str) -> str:
    """Returns the host of a URL."""
    return str(urlsplit(url).hostname)


def address_towards(host: str) -> str:
    """Returns the local address used to reach `host`. Sends nothing. Raises `OSError` if there is no route."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
