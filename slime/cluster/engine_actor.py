"""One inference engine as an actor: it owns the server process and nothing else.

Requests never pass through here: the rollout talks HTTP to the router, the weight sync HTTP to the server.

Consumes: calls of the driver, one at a time, and beside them `problem`. Produces: a server that answers, its URL, what
is wrong with it, and its end. Waits for: training ranks that lend their GPU at the start, the server's health, and its
answers about memory, each with a limit. Is woken by: the driver's calls alone.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ray

from slime.core.errors import EngineError
from slime.core.processes import LOOPBACK, host_port
from slime.observability.logs import setup_logging
from slime.serving.agent_process import AgentProcess, AgentSettings
from slime.serving.control import HttpEngineControl
from slime.serving.leased_ports import PortLease, lease_meeting_point
from slime.serving.server import ServerSpec, SGLangServer
from slime.serving.watch import ServerWatch
from slime.settings import Args

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Node:
    """One host of an engine that is on several."""

    rank: int
    """Of this host; the first one answers for the engine."""
    num_nodes: int
    gpu_ids: tuple[str, ...] | None
    """GPUs of its ranks here; None on a CPU."""


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
        node: Node | None = None,
        meeting_point: str | None = None,
        takes_weights: bool = True,
    ) -> None:
        """`name`: number of the engine, of its incarnation after the first, and of its host after the first; logs are
        called so. `host`: the address of this host that the server listens on. `node`: for an engine on several hosts;
        `meeting_point`: where their servers meet, which the first one decides. `takes_weights`: of the trainer.
        """
        setup_logging(Path(log_dir) / f"engine_actor_{name}.log", crashes=True)
        self._name = name
        self._meeting: PortLease | None = None
        if node is not None:
            if meeting_point is None:
                self._meeting = lease_meeting_point()
                meeting_point = host_port(host, self._meeting.port)
            spec = dataclasses.replace(
                spec,
                num_nodes=node.num_nodes,
                node_rank=node.rank,
                gpu_ids=node.gpu_ids,
                dist_init_addr=meeting_point,
            )
        self._server = SGLangServer(spec, host=host, log_path=Path(log_dir) / f"engine_{name}.log")
        self._server.start()
        self._spec, self._args, self._takes_weights = spec, args, takes_weights
        self._watch: ServerWatch | None = None
        self._agent: AgentProcess | None = None
        self._agent_log = Path(log_dir) / f"weights_agent_{name}.log"
        if not spec.answers_requests:
            self._start_watch()

    def meeting_point(self) -> str:
        """Where the servers of this engine meet, HOST:PORT."""
        assert self._spec.dist_init_addr is not None, "an engine on one host meets nobody"
        return self._spec.dist_init_addr

    def open_gate(self, *_lent: object) -> None:
        """Lets the server take its memory. `_lent`: answers of who lends it; Ray calls this when they are there."""
        self._server.open_gate()

    def wait_ready(self, timeout_s: float) -> str:
        """The server's URL once it answers."""
        self._server.wait_ready(timeout_s)
        args, spec, url = self._args, self._spec, self._server.url
        self._control = HttpEngineControl(url, spec.layout, args.weight_sync_timeout_s, spec.keys.control)
        if (settings := self._agent_settings()) is not None:
            self._agent = AgentProcess(settings, url, spec.keys.control, self._agent_log)
        self._start_watch()
        return url

    def _agent_settings(self) -> AgentSettings | None:
        """None where the engine loads no checkpoint of its host's own."""
        args, local_dir = self._args, self._args.components.get("update_weight_local_checkpoint_dir")
        if local_dir is None or args.update_weight_transport != "disk" or not self._takes_weights:
            return None
        hook = args.custom_pull_weights_pre_read_path
        disk_dir = args.components["update_weight_disk_dir"]
        return AgentSettings(disk_dir, local_dir, hook, args.weight_sync_timeout_s)

    @ray.method(concurrency_group="watch")
    def problem(self, expects_answers: bool) -> str | None:
        """What is wrong with the server, in one line; None if nothing is known to be. See `ServerWatch.trouble`."""
        if self._agent is not None:
            self._agent.tend()
        return None if self._watch is None else self._watch.trouble(expects_answers=expects_answers)

    def _start_watch(self) -> None:
        args = self._args
        self._watch = ServerWatch(
            self._server.problem,
            self._server.scheduler_answers,
            interval_s=args.rollout_health_check_interval,
            timeout_s=args.rollout_health_check_timeout,
            first_wait_s=args.rollout_health_check_first_wait,
            # On a GPU a scheduler that waits for a kernel that never ends uses a core.
            used_s=self._server.processor_s if self._spec.device == "cpu" else None,
        )

    def warm_digests(self) -> None:
        """Lets the server compile what it computes digests with, by asking for them. After `wait_ready`."""
        self._control.weight_checksums()

    def release_memory(self, tags: Sequence[str] | None = None) -> None:
        """Gives the device memory of these tags back (all of it by default). The engine must be idle."""
        self._control.flush_cache()
        self._control.release_memory(tags)

    def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        self._control.resume_memory(tags)

    def start_profile(self, directory: str, rollout_id: int) -> None:
        """Traces its next forward passes, as the settings say. A trace that the server refuses ends no run."""
        args = self._args
        try:
            self._control.start_profile(
                directory,
                f"step_{rollout_id}_engine_{self._name}",
                num_passes=args.profile_engine_passes,
                shapes=args.pytorch_profiler_collect_shapes,
                stack=args.pytorch_profiler_collect_callstack,
            )
        except EngineError as error:
            logger.warning("no trace of step %d: %s", rollout_id, error)

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.close()
        if self._agent is not None:
            self._agent.stop()
        self._server.stop()
        if self._meeting is not None:
            self._meeting.release()
