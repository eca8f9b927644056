"""Port leases, which keep runs on the same host from using the same port, and `LeasedServer`, the base class of SGLang
servers and routers.

An engine binds its port many seconds after choosing it, so another run could take the port in between. To lease a port,
this process binds a name in the abstract Unix socket namespace. Binding is atomic and, like TCP ports, scoped to the
network namespace. The kernel releases the name when the process exits, so there is no file to clean up.

Invariants
1. Within a host (network namespace), a port has at most one lease across all processes.
2. A port is leased only if it can be bound on loopback and on all interfaces, over IPv4 and IPv6. It lies outside the
   kernel's ephemeral range, so outgoing connections and binds to port 0 never take it.
3. Programs that do not use leases can still bind the port. The server then restarts on a different port.
"""

from __future__ import annotations

import errno
import http.client
import json
import random
import socket
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from slime.core.errors import EngineError
from slime.core.processes import http_url
from slime.serving.child_process import ChildProcess

FIRST_PORT = 20000
"""Above Ray's default worker ports (10002 to 19999)."""
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_PREFERRED_SPAN = 4000
"""If fewer ports than this lie below the ephemeral range, ports above the range are used as well."""


def candidate_ports() -> list[range]:
    """Returns the port ranges to lease from: above Ray's ports and outside the kernel's ephemeral range."""
    try:
        low, high = (int(x) for x in _EPHEMERAL_RANGE.read_text().split())
    except (OSError, ValueError):
        low, high = 32768, 60999
    below, above = range(FIRST_PORT, low), range(max(high + 1, FIRST_PORT), 65536)
    if len(below) >= _PREFERRED_SPAN:
        return [below]
    return [r for r in (below, above) if r] or [range(FIRST_PORT, 65536)]


def is_bindable(port: int) -> bool:
    """Returns whether `port` can be bound on loopback and on all interfaces, over IPv4 and IPv6."""
    for host in ("127.0.0.1", "0.0.0.0", "::1", "::"):
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # like servers: allows ports in TIME_WAIT
                if ":" in host:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((host, port))
        except OSError as error:
            if ":" not in host or error.errno not in NO_IPV6:
                return False
    return True


NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
"""Errors on a host without IPv6, or without IPv6 on loopback."""
MEETING_OFFSETS = (*range(7), 13)
"""Offset of the rendezvous port (0) and of the ports that SGLang 0.5.16 derives from it: the next five with DP
attention, one for loads, and one for the node handshake (`PortArgs`, `DP_ATTENTION_HANDSHAKE_PORT_DELTA`)."""
DERIVED_OFFSETS = (13, *range(233, 240))
"""Offsets of the ports that DP attention derives from a single-node server's port (`ZMQ_TCP_PORT_DELTA`)."""


@dataclass(slots=True)
class PortLease:
    """Reserves `ports` on this host until `release()`, the end of the `with` block, or process exit."""

    ports: tuple[int, ...]
    """The `count` requested ports, followed by the ports at offsets from the first one."""
    _names: list[socket.socket]

    @property
    def port(self) -> int:
        return self.ports[0]

    def release(self) -> None:
        """Releases the ports. Idempotent."""
        while self._names:
            self._names.pop().close()

    def __enter__(self) -> PortLease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def _claim(port: int) -> socket.socket | None:
    name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        name.bind(f"\0slime-port-{port}")
    except OSError:
        name.close()
        return None
    if not is_bindable(port):
        name.close()
        return None
    return name


def lease_port(port: int) -> PortLease:
    """Leases `port`. Raises `EngineError` if it is in use."""
    name = _claim(port)
    if name is None:
        raise EngineError(
            f"another program on this host uses port {port}; stop that program or choose a different port"
        )
    return PortLease((port,), [name])


def lease_meeting_point() -> PortLease:
    """Leases a rendezvous port for an engine's nodes, and the ports that SGLang derives from it.

    Call it on the first node's host.
    """
    return lease_ports(beside_first=MEETING_OFFSETS[1:])


def lease_ports(count: int = 1, *, beside_first: Sequence[int] = ()) -> PortLease:
    """Leases `count` free ports and the ports at the offsets `beside_first` from the first one.

    Raises `EngineError` if it finds too few free ports.
    """
    chooser = random.SystemRandom()  # unseeded, because runs with equal seeds would choose equal ports
    ranges = candidate_ports()
    ports: list[int] = []
    names: list[socket.socket] = []
    derived: list[int] = []
    for _ in range(2000):
        span = chooser.choices(ranges, weights=[len(r) for r in ranges])[0]
        first = chooser.choice(span)
        beside = [] if ports else [first + offset for offset in beside_first]
        wanted = [first, *beside]
        good = [] if max(wanted) > 65535 else [(p, n) for p in wanted if (n := _claim(p)) is not None]
        if len(good) < len(wanted):
            for _, name in good:
                name.close()
            continue
        ports.append(first)
        derived += beside
        names += [n for _, n in good]
        if len(ports) >= count:
            return PortLease((*ports, *derived), names)
    for name in names:
        name.close()
    raise EngineError(
        f"could not find {count} free ports in {ranges} in 2000 tries; stop the programs that use these ports, or "
        "narrow net.ipv4.ip_local_port_range"
    )


class LeasedServer:
    what: ClassVar[str]

    def __init__(self, *, host: str, log_path: str | Path) -> None:
        self.host = host.strip("[]")
        self.log_path = Path(log_path)
        self._lease: PortLease | None = None
        self._process: ChildProcess | None = None

    @property
    def port(self) -> int:
        """The first leased port. Raises `EngineError` before `start`."""
        if self._lease is None:
            raise EngineError(f"{self.what} has no port until start() is called")
        return self._lease.port

    @property
    def url(self) -> str:
        """The server's address, which can change on restart. Raises `EngineError` before `start`."""
        return http_url(self.host, self.port)

    @property
    def pid(self) -> int:
        """Pid of the first process, the session leader. Raises `EngineError` before `start`."""
        if self._process is None:
            raise EngineError(f"{self.what} has no process until start() is called")
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the first process is running. SGLang kills it when one of its children fails."""
        return self._process is not None and self._process.alive


_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # ignores proxy settings


def request(
    method: str, url: str, body: Any = None, *, timeout_s: float = 5.0, api_key: str | None = None
) -> tuple[int, str]:
    """Sends one HTTP request and returns (status, text), or (0, reason) if there is no response.

    Used for starting and stopping servers, not on the data path.
    """
    headers = {"Content-Type": "application/json"} if body is not None else {}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with _opener.open(urllib.request.Request(url, data, headers, method=method), timeout=timeout_s) as response:
            return response.status, response.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error)
