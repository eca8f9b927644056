"""Runs an engine's weights agent as a process on the engine's host. `tend` restarts it if it exits. Thread-safe."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from slime.serving.child_process import ChildProcess, python_module
from slime.serving.launch import ADMIN_KEY_ENV, API_KEY_ENV

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentSettings:
    disk_dir: str
    """The folder shared with the trainer."""
    local_dir: str
    """A folder on this host."""
    pre_read_hook: str | None
    """Import path of a user-defined function."""
    limit_s: float
    """Timeout of each request to the engine."""


class AgentProcess:
    """A running `slime weights-agent` process for the server at `url`."""

    def __init__(self, settings: AgentSettings, url: str, control_key: str | None, log_path: Path) -> None:
        self._settings, self._url, self._key, self._log_path = settings, url, control_key, log_path
        self._lock, self._over = threading.Lock(), False
        self._process = self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def tend(self) -> None:
        """Restarts the agent if it has exited. The new agent runs any unfinished call again."""
        with self._lock:
            if self._over or self._process.alive:
                return
            logger.warning("the weights agent of %s exited; restarting it (log: %s)", self._url, self._log_path)
            self._process.stop()
            self._process = self._start()

    def stop(self) -> None:
        with self._lock:
            self._over = True
            self._process.stop(timeout_s=1.0)

    def _start(self) -> ChildProcess:
        s = self._settings
        words = ["weights-agent", "--engine", self._url, "--disk-dir", s.disk_dir, "--local-dir", s.local_dir]
        words += ["--limit-s", str(s.limit_s)]
        words += ["--pre-read-hook", s.pre_read_hook] if s.pre_read_hook else []
        process = ChildProcess(
            f"the weights agent of {self._url}",
            python_module("slime.cli.main", words),
            log_path=self._log_path,
            env={ADMIN_KEY_ENV: self._key, API_KEY_ENV: None},
        )
        process.start()
        return process
