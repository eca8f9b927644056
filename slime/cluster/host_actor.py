"""One host of a run on which the driver does not run, as an actor: the first process of the run there, and the last.

Consumes: calls of the driver, one at a time beside `watching`. Produces: what this host has, what it does not see of
the shared folders, and a guardian that ends the run here (`host_guardian`). Waits for: shared folders to show what is
new, and the guardian at the end, each with a limit; `watching` for as long as a guardian watches. Is woken by: the
driver's calls, and `watching` by the guardian's end.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from slime.cluster.guardian import HostGuardian
from slime.cluster.hosts import Contract, contract_of, not_seen
from slime.cluster.slots import on_node
from slime.cluster.waiting import all_there, introduce, wait_for
from slime.core.blame import Process
from slime.core.cores import usable_cores
from slime.core.errors import START_FLAG, DeadlineExceeded, SlimeError
from slime.core.processes import RUN_ID_ENV
from slime.observability.logs import setup_logging
from slime.settings import Args


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What a host says of itself."""

    name: str
    num_cores: int
    """Cores of processes that Ray starts there."""


def facts_here() -> HostFacts:
    """Of the host that this process runs on."""
    return HostFacts(socket.gethostname(), usable_cores())


@ray.remote(max_restarts=0, num_cpus=0, max_concurrency=2)
class HostActor:
    """Shell around `HostGuardian`, with eyes."""

    def __init__(self) -> None:
        self._guardian: HostGuardian | None = None

    def facts(self) -> HostFacts:
        return facts_here()

    def not_seen(self, contract: Contract) -> list[str]:
        """What this host does not see as the driver does, in words."""
        return not_seen(contract)

    def guard(self, log_dir: str) -> None:
        """Starts the guardian; from now on nothing of the run outlives its driver here. `log_dir` is shared."""
        name = socket.gethostname()
        setup_logging(Path(log_dir) / f"host_{name}.log", crashes=True)
        self._guardian = HostGuardian(os.environ[RUN_ID_ENV], log_path=Path(log_dir) / f"guardian_{name}.log")

    def take_up(self, contract: Contract, log_dir: str) -> list[str]:
        """Of a host that came back: what it does not see; if it sees everything, it is guarded now."""
        problems = not_seen(contract)
        if not problems:
            self.guard(log_dir)
        return problems

    def watching(self) -> None:
        """Returns when no guardian watches here any more, and none follows."""
        assert self._guardian is not None, "nobody watches yet"
        self._guardian.wait()

    def close(self) -> None:
        """Ends what is left of the run here, this process spared."""
        if self._guardian is not None:
            self._guardian.close()
            self._guardian = None


# The driver's handle of the actor of a host (`HostActor`), and where Ray says which nodes there are.
#
# Consumes: calls of the driver's thread. Produces: an actor on a node, with a guardian there. Waits for nothing but in
# `close`, with limits. For each host that is taken up a thread writes the tokens, which may take long in a folder over
# a network, and removes them when it is woken by the host's answer, or by `drop`.
#
# Invariants
# 1. The tokens of a contract are there while the host looks for them, and no longer.
# 2. Only the driver's thread calls Ray: a call after Ray's end would start a new one.

logger = logging.getLogger(__name__)

EMPTY_LIMIT_S = 120.0
"""Of the end: a guardian ends what is left on the host, which takes it 15 s."""
TOKENS_LIMIT_S = 5.0
"""How long the removal of tokens may take at the end of the run."""


class HostHandle:
    """The actor of one node."""

    def __init__(self, node_id: str, host: str, *, limit_s: float) -> None:
        """Starts it. `host`: for people. `limit_s`: of each of its answers (--engine-start-timeout-s), because a
        process starts, imports, and may wait for a shared folder.
        """
        self._node_id, self._host, self._limit_s = node_id, host, limit_s
        actor: Any = HostActor.options(**on_node(node_id)).remote()  # type: ignore[attr-defined]
        self.actor = introduce(actor, Process("the owner of the guardian", host))
        self._watching: Any = None
        """Answered when nobody guards the host any more."""
        self._contract: Future[Contract] = Future()
        self._answered = threading.Event()
        self._holder: threading.Thread | None = None
        """Of the tokens."""
        self._log_dir = Path()
        self._asked: Any = None
        self._asked_at = 0.0

    def guarded(self) -> None:
        """It has started a guardian: `watches` says for how long."""
        self._watching = self.actor.watching.remote()

    def take_up(self, args: Args, log_dir: Path) -> None:
        """Has it look for the shared folders and start a guardian; `unseen` says how that goes on."""

        def keep_tokens() -> None:
            try:
                with contract_of(args, log_dir.parent, under_way=True) as contract:
                    self._contract.set_result(contract)
                    self._answered.wait()
            except BaseException as error:  # raised for whoever asks
                if self._contract.done():
                    logger.warning("files by which host %s saw the shared folders are left: %s", self._node_id, error)
                else:
                    self._contract.set_exception(error)

        self._log_dir = log_dir
        self._holder = threading.Thread(target=keep_tokens, name=f"host {self._node_id[:8]}", daemon=True)
        self._holder.start()

    def unseen(self) -> list[str] | None:
        if not self._contract.done():
            return None
        if self._asked is None:
            self._asked = self.actor.take_up.remote(self._contract.result(), str(self._log_dir))
            self._asked_at = time.monotonic()
        if not all_there([self._asked]):
            if time.monotonic() - self._asked_at > self._limit_s:
                what = f"an answer of host {self._host}"
                raise DeadlineExceeded.waiting(owner="driver", for_what=what, limit_s=self._limit_s, flag=START_FLAG)
            return None
        self._answered.set()
        unseen: list[str]
        (unseen,) = wait_for([self._asked], for_what=f"the return of host {self._host}", limit_s=self._limit_s)
        if not unseen:
            self.guarded()
        return unseen

    def watches(self) -> bool:
        return not all_there([self._watching])

    def drop(self) -> None:
        self._answered.set()
        ray.kill(self.actor)

    def close(self) -> None:
        if self._holder is not None and self._watching is None:  # nothing else of the run is there
            self.drop()
            self._holder.join(TOKENS_LIMIT_S)
            return
        try:
            wait_for([self.actor.close.remote()], for_what=f"host {self._host} to be empty", limit_s=EMPTY_LIMIT_S)
        except SlimeError as error:  # Ray ends its actor with the driver, and the guardian follows
            logger.warning("host %s did not say that it is empty: %s", self._node_id, str(error).splitlines()[0])


class RayNodes:
    """The nodes of the cluster that the driver has joined."""

    def __init__(self, args: Args, *, log_dir: Path) -> None:
        """`log_dir`: of the run folder."""
        self._args, self._log_dir = args, log_dir

    def living(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for node in ray.nodes():
            if node["Alive"]:
                found.setdefault(node["NodeManagerAddress"], []).append(node["NodeID"])
        return found

    def take_up(self, node_id: str) -> HostHandle:
        handle = HostHandle(node_id, node_id[:8], limit_s=self._args.engine_start_timeout_s)
        handle.take_up(self._args, self._log_dir)
        return handle
