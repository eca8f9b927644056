"""Leased ports, which no other run on the host gets until they are released; and `LeasedServer`, the common part of
SGLang servers and routers.

An engine binds its port many seconds after it was chosen, so looking for a free port would be a race. A lease is a name
in the abstract Unix socket namespace, bound by this process: atomic, scoped to the network namespace as TCP ports are,
released whenever the process ends, and without a file.

Invariants
1. A port has at most one lease on a host (one network namespace), across processes.
2. When it was leased, a port was bindable on loopback and on all interfaces, over IPv4 and IPv6. It is outside the
   kernel's ephemeral range, so no outgoing connection and no bind to port 0 takes it.
3. Programs without leases can still take the port; a server then starts again on another one.
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
"""With fewer ports below the ephemeral range, those above it are used as well."""


def candidate_ports() -> list[range]:
    """Ranges to lease from: above Ray's ports and outside the kernel's ephemeral range."""
    try:
        low, high = (int(x) for x in _EPHEMERAL_RANGE.read_text().split())
    except (OSError, ValueError):
        low, high = 32768, 60999
    below, above = range(FIRST_PORT, low), range(max(high + 1, FIRST_PORT), 65536)
    if len(below) >= _PREFERRED_SPAN:
        return [below]
    return [r for r in (below, above) if r] or [range(FIRST_PORT, 65536)]


def is_bindable(port: int) -> bool:
    """Whether nothing listens on `port`, on loopback or on any interface, over IPv4 or IPv6."""
    for host in ("127.0.0.1", "0.0.0.0", "::1", "::"):
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: TIME_WAIT does not matter
                if ":" in host:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((host, port))
        except OSError as error:
            if ":" not in host or error.errno not in NO_IPV6:
                return False
    return True


NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
"""Errors of a host without IPv6, or without it on loopback."""
MEETING_OFFSETS = (*range(7), 13)
"""Offsets of the ports that SGLang 0.5.16 derives from an engine's meeting point: with DP attention the next five, one
for loads, and one for the handshake of the nodes (`PortArgs`, `DP_ATTENTION_HANDSHAKE_PORT_DELTA`)."""
DERIVED_OFFSETS = (13, *range(233, 240))
"""Offsets of the ports that DP attention derives from the port of a single-node server (`ZMQ_TCP_PORT_DELTA`)."""


@dataclass(slots=True)
class PortLease:
    """The right to use `ports` on this host, until `release()`, the end of the `with` block or of the process."""

    ports: tuple[int, ...]
    """The requested ports, then those at offsets from the first one."""
    _names: list[socket.socket]

    @property
    def port(self) -> int:
        return self.ports[0]

    def release(self) -> None:
        """May be called again."""
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
    """Raises `EngineError` if a run or another program has the port."""
    name = _claim(port)
    if name is None:
        raise EngineError(f"got port {port}, which another program on this host uses; end it or choose another port")
    return PortLease((port,), [name])


def lease_meeting_point() -> PortLease:
    """Leases a port, on the host of an engine's first node, for its nodes to meet, with the ports SGLang derives."""
    return lease_ports(beside_first=MEETING_OFFSETS[1:])


def lease_ports(count: int = 1, *, beside_first: Sequence[int] = ()) -> PortLease:
    """Leases `count` free ports, and the ports at offsets `beside_first` from the first.

    Raises `EngineError` if the host has none left.
    """
    chooser = random.SystemRandom()  # not the seeded global generator: runs with one seed would choose the same ports
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
        f"found no {count} free ports in {ranges} after 2000 tries, because other programs hold them; end those "
        "programs or narrow net.ipv4.ip_local_port_range"
    )


class LeasedServer:
    """A server process on leased ports."""

    what: ClassVar[str]

    def __init__(self, *, host: str, log_path: str | Path) -> None:
        self.host = host.strip("[]")
        self.log_path = Path(log_path)
        self._lease: PortLease | None = None
        self._process: ChildProcess | None = None

    @property
    def port(self) -> int:
        """Raises `EngineError` before `start`."""
        if self._lease is None:
            raise EngineError(f"{self.what} has no port before start()")
        return self._lease.port

    @property
    def url(self) -> str:
        """Changes with a repeated start. Raises `EngineError` before `start`."""
        return http_url(self.host, self.port)

    @property
    def pid(self) -> int:
        """The first process, which leads the session. Raises `EngineError` before `start`."""
        if self._process is None:
            raise EngineError(f"{self.what} has no process before start()")
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the first process runs; SGLang ends it when one of its children fails."""
        return self._process is not None and self._process.alive


_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # without the host's proxies


def request(
    method: str, url: str, body: Any = None, *, timeout_s: float = 5.0, api_key: str | None = None
) -> tuple[int, str]:
    """(status, text) of one HTTP request; without an answer, status 0 and the reason. For start and stop of a server,
    not for the data path.
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
