"""The driver's handle of the actor of a host (`HostActor`), and where Ray says which nodes there are.

Consumes: calls of the driver's thread. Produces: an actor on a node, with a guardian there. Waits for nothing but in
`close`, with limits; what may take long (tokens in folders over a network, the host's answer) a thread of its own waits
for, one for each host that is taken up. Is woken by nothing.

Invariant: the tokens of a contract are there while the host looks for them, and no longer.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray

from slime.cluster.host_actor import HostActor
from slime.cluster.shared_paths import contract_of
from slime.cluster.slots import on_node
from slime.cluster.waiting import all_there, wait_for
from slime.core.errors import SlimeError
from slime.settings import Args

logger = logging.getLogger(__name__)

HOST_LIMIT_S = 120.0
"""Limit of a call to the actors of hosts: a process starts, and may wait for a shared folder."""
TOKENS_LIMIT_S = 5.0
"""How long the removal of tokens may take at the end of the run."""


class HostHandle:
    """The actor of one node."""

    def __init__(self, node_id: str) -> None:
        """Starts it."""
        self._node_id = node_id
        self.actor: Any = HostActor.options(**on_node(node_id)).remote()  # type: ignore[attr-defined]
        self._watching: Any = None
        """Answered when nobody guards the host any more."""
        self._answer: Future[list[str]] = Future()
        self._taking: threading.Thread | None = None

    def guarded(self) -> None:
        """It has started a guardian: `watches` says for how long."""
        self._watching = self.actor.watching.remote()

    def take_up(self, args: Args, log_dir: Path) -> None:
        """Asks it, in the background, to look for the shared folders and to start a guardian; then `unseen` says."""

        def take_up() -> None:
            try:
                with contract_of(args, log_dir.parent, under_way=True) as contract:
                    asked = self.actor.take_up.remote(contract, str(log_dir))
                    (unseen,) = wait_for([asked], for_what="a host to have a guardian", limit_s=HOST_LIMIT_S)
                self._answer.set_result(unseen)
            except BaseException as error:  # raised for whoever asks
                self._answer.set_exception(error)

        self._taking = threading.Thread(target=take_up, name=f"host {self._node_id[:8]}", daemon=True)
        self._taking.start()

    def unseen(self) -> list[str] | None:
        if not self._answer.done():
            return None
        unseen = self._answer.result()
        if not unseen:
            self.guarded()
        return unseen

    def watches(self) -> bool:
        return not all_there([self._watching])

    def drop(self) -> None:
        ray.kill(self.actor)

    def close(self) -> None:
        if self._taking is not None and self._watching is None:  # nothing else of the run is there
            self.drop()
            self._taking.join(TOKENS_LIMIT_S)
            return
        try:
            wait_for([self.actor.close.remote()], for_what="a host to be empty", limit_s=HOST_LIMIT_S)
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
        handle = HostHandle(node_id)
        handle.take_up(self._args, self._log_dir)
        return handle
