"""One inference engine as an actor: it owns the server process and nothing else.

Requests never pass through here: the rollout talks HTTP to the router, the weight sync HTTP to the server.

Consumes: calls of the driver, one at a time. Produces: a server that answers, its URL, and its end. Waits for: training
ranks that lend their GPU at the start, the server's health, and its answers about memory, each with a limit. Is woken
by: the driver's calls alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import ray

from slime.observability.logs import setup_logging
from slime.serving.control import HttpEngineControl
from slime.serving.server import ServerSpec, SGLangServer


@ray.remote(max_restarts=0)
class EngineActor:
    """Shell around `SGLangServer`."""

    def __init__(self, index: int, spec: ServerSpec, log_dir: str, control_timeout_s: float) -> None:
        setup_logging(Path(log_dir) / f"engine_actor_{index}.log")
        self._server = SGLangServer(spec, log_path=Path(log_dir) / f"engine_{index}.log")
        self._server.start()
        self._spec, self._timeout_s = spec, control_timeout_s

    def open_gate(self, *_lent: object) -> None:
        """Lets the server take its memory. `_lent`: answers of who lends it; Ray calls this when they are there."""
        self._server.open_gate()

    def wait_ready(self, timeout_s: float) -> str:
        """The server's URL once it answers."""
        self._server.wait_ready(timeout_s)
        self._control = HttpEngineControl(
            self._server.url, tp_size=self._spec.tp_size, timeout_s=self._timeout_s, api_key=self._spec.api_key
        )
        return self._server.url

    def warm_digests(self) -> None:
        """Lets the server compile what it computes digests with, by asking for them. After `wait_ready`."""
        self._control.weight_checksums()

    def release_memory(self, tags: Sequence[str] | None = None) -> None:
        """Gives the device memory of these tags back (all of it by default). The engine must be idle."""
        self._control.flush_cache()
        self._control.release_memory(tags)

    def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        self._control.resume_memory(tags)

    def require_alive(self) -> None:
        """Raises `EngineError` if the server has ended."""
        self._server.require_alive()

    def stop(self) -> None:
        self._server.stop()
