"""`LeasedServer`: what SGLang servers and the router share: a host, leased ports, one child process."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from slime.core.blame import here, how_it_ended
from slime.core.errors import EngineError
from slime.core.processes import http_url
from slime.serving.ports import PortLease
from slime.serving.process import ChildProcess


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
