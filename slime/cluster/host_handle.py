"""The driver's handle of the actor of a host (`HostActor`), and where Ray says which nodes there are.

Consumes: calls of the driver's thread. Produces: an actor on a node, with a guardian there. Waits for nothing but in
`close`, with limits. For each host that is taken up a thread writes the tokens, which may take long in a folder over a
network, and removes them when it is woken by the host's answer, or by `drop`.

Invariants
1. The tokens of a contract are there while the host looks for them, and no longer.
2. Only the driver's thread calls Ray: a call after Ray's end would start a new one.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray

from slime.cluster.failures import introduce
from slime.cluster.host_actor import HostActor
from slime.cluster.shared_paths import Contract, contract_of
from slime.cluster.slots import on_node
from slime.cluster.waiting import all_there, wait_for
from slime.core.blame import Process
from slime.core.errors import START_FLAG, DeadlineExceeded, SlimeError
from slime.settings import Args

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
