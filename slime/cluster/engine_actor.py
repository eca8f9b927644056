"""One inference engine as an actor: it owns the server process and nothing else.

Requests never pass through here: the rollout talks HTTP to the router, the weight sync HTTP to the server.

Consumes: calls of the driver, one at a time, and beside them `problem`. Produces: a server that answers, its URL, what
is wrong with it, and its end. Waits for: training ranks that lend their GPU at the start, the server's health, and its
answers about memory, each with a limit. Is woken by: the driver's calls alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import ray

from slime.core.addresses import LOOPBACK
from slime.observability.logs import setup_logging
from slime.serving.control import HttpEngineControl
from slime.serving.server import ServerSpec, SGLangServer
from slime.serving.watch import ServerWatch
from slime.settings import Args


@ray.remote(max_restarts=0, concurrency_groups={"watch": 1})
class EngineActor:
    """Shell around `SGLangServer`."""

    def __init__(
        self,
        name: str,
        spec: ServerSpec,
        log_dir: str,
        args: Args,
        host: str = LOOPBACK,
        meeting_point: str | None = None,
    ) -> None:
        """`name`: number of the engine, of its incarnation after the first, and of its host after the first; logs are
        called so. `host`: the address of this host that the server listens on. `meeting_point`: where the servers of an
        engine on several hosts meet; None on the first of them.
        """
        setup_logging(Path(log_dir) / f"engine_actor_{name}.log")
        self._server = SGLangServer(spec, host=host, log_path=Path(log_dir) / f"engine_{name}.log")
        self._server.start()
        self._spec, self._args = spec, args
        self._watch: ServerWatch | None = None

    def open_gate(self, *_lent: object) -> None:
        """Lets the server take its memory. `_lent`: answers of who lends it; Ray calls this when they are there."""
        self._server.open_gate()

    def wait_ready(self, timeout_s: float) -> str:
        """The server's URL once it answers."""
        self._server.wait_ready(timeout_s)
        args, spec, url = self._args, self._spec, self._server.url
        self._control = HttpEngineControl(
            url, tp_size=spec.tp_size, timeout_s=args.weight_sync_timeout_s, api_key=spec.api_key
        )
        self._watch = ServerWatch(
            self._server.problem,
            self._server.scheduler_answers,
            interval_s=args.rollout_health_check_interval,
            timeout_s=args.rollout_health_check_timeout,
            first_wait_s=args.rollout_health_check_first_wait,
        )
        return url

    @ray.method(concurrency_group="watch")
    def problem(self, expects_answers: bool) -> str | None:
        """What is wrong with the server, in one line; None if nothing is known to be. See `ServerWatch.trouble`."""
        return None if self._watch is None else self._watch.trouble(expects_answers=expects_answers)

    def warm_digests(self) -> None:
        """Lets the server compile what it computes digests with, by asking for them. After `wait_ready`."""
        self._control.weight_checksums()

    def release_memory(self, tags: Sequence[str] | None = None) -> None:
        """Gives the device memory of these tags back (all of it by default). The engine must be idle."""
        self._control.flush_cache()
        self._control.release_memory(tags)

    def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        self._control.resume_memory(tags)

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._server.stop()
