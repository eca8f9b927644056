"""Which hosts of a run have a guardian now, and that each gets another one when it has lost its own.

    own host      its guardian belongs to the driver, which starts another one when it was killed
    other hosts   an actor there owns it (`HostActor`), in the driver's hands by a `Handle`

    node of Ray at the address of a host     what becomes of it
    guarded                                  engines may start there; its handle says when that ends
    has lost its actor or its guardian       another actor, `AFTER_LOSS_S` later; the host counts as there meanwhile
    new: the host was away and is back       an actor at once; the host counts as there when it is guarded
    refused: it does not see a folder,       asked again every `ASK_AGAIN_S`; the host counts as away
    or no guardian starts there

Consumes what handles say and what Ray says of its nodes, whenever the driver calls `tend`. Produces a guardian on each
host that is there. Waits for nothing but in `close`, with a limit (and for a guardian of its own host to say that it
watches, a tenth of a second); nobody wakes it.

Invariants
1. Nothing of the run starts on another host while no guardian is known to watch there (`is_guarded`).
2. Only success is remembered: what was refused is asked again for as long as the run goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from slime.cluster.placement import Host
from slime.core.errors import ActorDied, SlimeError

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 30.0
"""After a refusal: a shared folder may be mounted late."""
AFTER_LOSS_S = 5.0
"""After the end of an actor: its guardian ends everything of the run on the host, another actor, too."""
MOST_DEATHS = 12
"""Of actors in a row that an old guardian may have ended; it is given a minute. Another one is a refusal."""


class Handle(Protocol):
    """The actor of one host, from the moment that it is asked to guard."""

    def unseen(self) -> list[str] | None:
        """What the host does not see of the shared folders; nothing: it is guarded; None: it has not answered yet.

        Never waits. Raises `SlimeError` or `OSError` if there is no guardian.
        """
        ...

    def watches(self) -> bool:
        """Of a host that is guarded: whether it still is. Never waits."""
        ...

    def drop(self) -> None:
        """Ends the actor at once. Never waits, never raises."""
        ...

    def close(self) -> None:
        """Ends what is left of the run on the host. Never raises: an error that ends the run is the one to tell."""
        ...


class Nodes(Protocol):
    """The nodes of Ray."""

    def living(self) -> Mapping[str, list[str]]:
        """Address -> the nodes there that live."""
        ...

    def take_up(self, node_id: str) -> Handle:
        """Starts an actor there that looks for the shared folders and starts a guardian. Never waits."""
        ...


class OwnGuardian(Protocol):
    """That of the driver's host."""

    def tend(self) -> None:
        """Starts another one if it was killed. Never raises."""
        ...


@dataclass(slots=True)
class _Node:
    """A node at the address of a host, for as long as it lives."""

    host: Host
    handle: Handle | None = None
    """None between two tries."""
    is_guarded: bool = False
    is_there: bool = False
    """It has been guarded, and was not refused since."""
    again_at: float = 0.0
    refusal: str = ""
    """What was said last."""
    num_died: int = 0
    """Actors that ended there since it was guarded last."""


class GuardedHosts:
    """The hosts of a plan, the driver's first."""

    def __init__(
        self,
        own: OwnGuardian,
        nodes: Nodes | None = None,
        first: Mapping[Host, Handle] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`first`: the handles of the other hosts, all of them guarded; `nodes` is needed if there are any."""
        self._own, self._ray, self._clock = own, nodes, clock
        self._others = tuple(first or {})
        self._nodes = {str(h.node_id): _Node(h, handle, True, True) for h, handle in (first or {}).items()}

    def tend(self) -> None:
        """Looks once: who has lost a guardian gets another one."""
        self._own.tend()
        for node in self._nodes.values():
            if node.is_guarded and node.handle is not None and not node.handle.watches():
                logger.warning("the guardian of host %s, or the actor that keeps it, was lost", node.host)
                node.is_guarded = False
                self._put_off(node, AFTER_LOSS_S)
        if self._ray is None or all(self.is_guarded(host) for host in self._others):
            return
        living = self._ray.living()
        for host in self._others:
            for node_id in living.get(host.address, ()):
                self._go_on(node_id, self._nodes.setdefault(node_id, _Node(host)))
        known = {node_id for nodes in living.values() for node_id in nodes}
        for node_id in self._nodes.keys() - known:
            self._put_off(self._nodes.pop(node_id), 0.0)

    def is_guarded(self, host: Host) -> bool:
        """Whether something may be started there now."""
        return host not in self._others or any(node.is_guarded for node in self._at(host))

    def has(self, host: Host) -> bool:
        """Whether the host is there: guarded, or about to be so again."""
        return host not in self._others or any(node.is_there for node in self._at(host))

    def close(self) -> None:
        """Ends what is left on the other hosts. Never raises."""
        for node in self._nodes.values():
            if node.handle is not None:
                node.handle.close()

    def _at(self, host: Host) -> list[_Node]:
        return [node for node in self._nodes.values() if node.host.address == host.address]

    def _go_on(self, node_id: str, node: _Node) -> None:
        if node.is_guarded:
            return
        if node.handle is None:
            if self._ray is not None and self._clock() >= node.again_at:
                logger.info("host %s looks for the shared folders, and its guardian starts", node.host)
                node.handle = self._ray.take_up(node_id)
            return
        try:
            if (unseen := node.handle.unseen()) is None:
                return
        except ActorDied as error:  # an old guardian ended it, or the host is lost again
            node.num_died += 1
            if node.num_died > MOST_DEATHS:
                self._refuse(node, f"an actor ended there {node.num_died} times before it had a guardian: {error}")
                return
            logger.warning("host %s did not start a guardian: %s", node.host, error)
            self._put_off(node, AFTER_LOSS_S)
            return
        except (SlimeError, OSError) as error:
            self._refuse(node, f"it did not start a guardian: {error}")
            return
        if unseen:
            self._refuse(node, f"it does not see {'; '.join(unseen)}")
        else:
            logger.info("host %s has a guardian again", node.host)
            node.is_guarded = node.is_there = True
            node.refusal, node.num_died = "", 0

    def _refuse(self, node: _Node, because: str) -> None:
        if node.refusal != because:
            logger.warning("host %s is not used, because %s; asked every %.0f s", node.host, because, ASK_AGAIN_S)
        node.refusal, node.is_there = because, False
        self._put_off(node, ASK_AGAIN_S)

    def _put_off(self, node: _Node, pause_s: float) -> None:
        if node.handle is not None:
            node.handle.drop()
        node.handle, node.again_at = None, self._clock() + pause_s
