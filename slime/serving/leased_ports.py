"""Ports of a run: found free, and kept from every other run on the host until they are given back.

An engine needs many seconds between "you get port p" and binding it, so a free port that is merely looked up is a race.
A lease is a name in the abstract Unix socket namespace, bound by this process: atomic, scoped like TCP ports to the
network namespace, gone with the process whatever kills it, and no file on disk.

Invariants
1. Two leases of one port never exist at the same time on a host (one network namespace), across processes.
2. A leased port was bindable on loopback and on all interfaces when it was leased, over IPv4 and IPv6, and lies outside
   the kernel's ephemeral range, so no outgoing connection and no bind to port 0 can take it.
3. Programs that know nothing of leases can still take the port; servers answer that by starting again on another one.
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

from slime.core.blame import here, how_it_ended
from slime.core.errors import EngineError
from slime.core.processes import http_url
from slime.serving.child_process import ChildProcess

FIRST_PORT = 20000
"""Below lie Ray's default worker ports (10002 to 19999)."""
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_PREFERRED_SPAN = 4000
"""Fewer ports than this below the ephemeral range: use all that lie above it as well."""


def candidate_ports() -> list[range]:
    """Ranges that leases are taken from: above Ray's and outside the kernel's ephemeral range."""
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
"""What a host says that has no IPv6, or none on loopback."""
MEETING_OFFSETS = (*range(7), 13)
"""Ports that SGLang 0.5.16 takes from the one on which the nodes of an engine meet: with DP attention the five behind
it and one for loads, and one on which nodes learn of each other (`PortArgs`, `DP_ATTENTION_HANDSHAKE_PORT_DELTA`)."""
DERIVED_OFFSETS = (13, *range(233, 240))
"""Ports that DP attention takes from that of a server that is one node (`ZMQ_TCP_PORT_DELTA`)."""


@dataclass(slots=True)
class PortLease:
    """The right to use `ports` on this host; ends with `release()`, the `with` block or the process."""

    ports: tuple[int, ...]
    """Consecutive if leased so; those derived from the first one behind the others."""
    _names: list[socket.socket]

    @property
    def port(self) -> int:
        """The first port."""
        return self.ports[0]

    def release(self) -> None:
        """Gives the ports back. May be called again."""
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
    """Leases this very port. Raises `EngineError` if it is taken, by a run or by another program."""
    name = _claim(port)
    if name is None:
        raise EngineError(f"got port {port}, which another program on this host uses; end it or choose another port")
    return PortLease((port,), [name])


def lease_meeting_point() -> PortLease:
    """Leases a port on which the nodes of an engine meet, on the host of the first one, with what SGLang derives."""
    return lease_ports(beside_first=MEETING_OFFSETS[1:])


def lease_ports(count: int = 1, *, consecutive: bool = False, beside_first: Sequence[int] = ()) -> PortLease:
    """Leases `count` free ports, neighbours if `consecutive`. Raises `EngineError` if the host has none left.

    `beside_first`: offsets from the first port that must be free and are leased with it, behind the others.
    """
    chooser = random.SystemRandom()  # never the seeded global generator: two runs with one seed must not meet
    ranges = candidate_ports()
    ports: list[int] = []
    names: list[socket.socket] = []
    derived: list[int] = []
    for _ in range(2000):
        span = chooser.choices(ranges, weights=[len(r) for r in ranges])[0]
        width = count if consecutive else 1
        first = chooser.randrange(span.start, max(span.stop - width + 1, span.start + 1))
        beside = [] if ports else [first + offset for offset in beside_first]
        wanted = [*range(first, first + width), *beside]
        good = [] if max(wanted) > 65535 else [(p, n) for p in wanted if (n := _claim(p)) is not None]
        if len(good) < len(wanted):
            for _, name in good:
                name.close()
            continue
        ports += wanted[:width]
        derived += beside
        names += [n for _, n in good]
        if len(ports) >= count:
            return PortLease((*ports, *derived), names)
    for name in names:
        name.close()
    raise EngineError(
        f"got no {count} free ports in {ranges} after 2000 tries, because other programs hold them; "
        "end those programs or widen the range outside net.ipv4.ip_local_port_range"
    )


# `LeasedServer`: what SGLang servers and the router share: a host, leased ports, one child process.


class LeasedServer:
    """A server process of this run on ports of its own."""

    what: ClassVar[str]
    """Its name in errors."""

    def __init__(self, *, host: str, log_path: str | Path) -> None:
        self.host = host.strip("[]")
        self.log_path = Path(log_path)
        self._lease: PortLease | None = None
        self._process: ChildProcess | None = None

    @property
    def port(self) -> int:
        """HTTP port. Raises `EngineError` before `start`."""
        if self._lease is None:
            raise EngineError(f"{self.what} has no port before start()")
        return self._lease.port

    @property
    def url(self) -> str:
        """`http://host:port`; another one after a repeated start. Raises `EngineError` before `start`."""
        return http_url(self.host, self.port)

    @property
    def pid(self) -> int:
        """Pid of the first process, which leads the others' session. Raises `EngineError` before `start`."""
        if self._process is None:
            raise EngineError(f"{self.what} has no process before start()")
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the first process runs (SGLang ends it when one of its children fails)."""
        return self._process is not None and self._process.alive

    def require_alive(self) -> None:
        """Raises `EngineError` with the exit status and the end of the log if the process has ended."""
        if self._process is None or self._process.alive:
            return
        raise EngineError(
            f"{here(self._process.name)} {how_it_ended(self._process.returncode)}; its log {self.log_path} ends with:\n"
            f"{self._process.log_tail()}"
        )


# One HTTP request to a local server, with the standard library: for start-up and shut-down, not for the data path.

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy of the host's is never asked


def request(
    method: str, url: str, body: Any = None, *, timeout_s: float = 5.0, api_key: str | None = None
) -> tuple[int, str]:
    """Returns (status, text); status 0 with the reason as text if there was no answer. Never raises on a refusal."""
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
