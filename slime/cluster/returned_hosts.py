"""Which hosts of a plan are there: as when the run began, or lost and back again, with a guardian of the run.

    there      Ray knows a living node at the address of the host: the one of the plan, or another one, which has come
               back, sees the shared folders and has a guardian by now
    not there  anything else; a host that has come back is made ready in the background

Consumes what Ray says of its nodes, whenever somebody asks. Produces an actor on each host that came back, and at
`close` the end of what is left there. Waits for nothing but in `close`, with a limit; nobody wakes it.

Invariant: nothing of the run starts on a host that came back before its guardian watches.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from slime.cluster.failures import translated
from slime.cluster.host_actor import HostActor
from slime.cluster.hosts import end_host
from slime.cluster.placement import Host, PlacementPlan
from slime.cluster.shared_paths import contract_of
from slime.cluster.slots import on_node
from slime.settings import Args

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Returned:
    """A host under another node."""

    actor: Any
    answer: Any
    """What it does not see of the shared folders; nothing once its guardian watches."""
    tokens: ExitStack
    """The files that it looks for, until it has answered."""


class ReturnedHosts:
    """The hosts of a plan, asked about one by one."""

    def __init__(self, args: Args, plan: PlacementPlan, *, log_dir: Path) -> None:
        """`log_dir`: of the run folder."""
        self._args, self._log_dir = args, log_dir
        self._first = {host.address: host.node_id for host in plan.hosts}
        self._returned: dict[str, _Returned] = {}
        """By node."""
        self._verdicts: dict[str, bool] = {}
        """Of nodes that have answered: whether they may be used."""

    def has(self, host: Host) -> bool:
        """Whether the run may start something there now. Never waits."""
        if host.node_id is None:  # a Ray of the run's own
            return True
        alive = [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeManagerAddress"] == host.address]
        if self._first[host.address] in alive:
            return True
        return any([self._is_ready(node_id, host) for node_id in alive])

    def close(self) -> None:
        """Ends what is left on those that came back. Never raises: an error that ends the run is the one to tell."""
        for node_id, returned in self._returned.items():
            returned.tokens.close()
            end_host(node_id, returned.actor)

    def _is_ready(self, node_id: str, host: Host) -> bool:
        if node_id in self._verdicts:
            return self._verdicts[node_id]
        returned = self._returned.get(node_id)
        if returned is None:
            logger.info("host %s is back; it looks for the shared folders, and its guardian starts", host)
            self._returned[node_id] = self._take_up(node_id)
            return False
        if not ray.wait([returned.answer], timeout=0)[0]:
            return False
        returned.tokens.close()
        try:
            unseen: list[str] = ray.get(returned.answer)
        except RayError as error:  # it may have been lost again; it is asked once more
            logger.warning("host %s did not start a guardian: %s", host, translated(error, "its return"))
            del self._returned[node_id]
            return False
        if unseen:
            logger.warning("host %s is back and is not used, because it does not see %s", host, "; ".join(unseen))
        else:
            logger.info("host %s has a guardian again", host)
        self._verdicts[node_id] = not unseen
        return not unseen

    def _take_up(self, node_id: str) -> _Returned:
        tokens = ExitStack()
        try:
            contract = tokens.enter_context(contract_of(self._args, self._log_dir.parent))
            actor: Any = HostActor.options(**on_node(node_id)).remote()  # type: ignore[attr-defined]
            return _Returned(actor, actor.take_up.remote(contract, str(self._log_dir)), tokens)
        except BaseException:
            tokens.close()
            raise
