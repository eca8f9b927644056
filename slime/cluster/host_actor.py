"""Another host of a run than the driver's: its actor (`HostActor`) and the driver's handle of it (`HostHandle`).

The actor is the first and the last process of the run on its host. The driver calls it, one call at a time beside
`watching`: it tells the host's facts, checks that it sees the shared folders, and keeps a guardian. Its waits have
limits, except `watching`, which returns when no guardian watches any more.

The handle serves the driver's thread and waits only in `close`. A host that comes back has a thread of its own, which
writes the tokens of its contract (slow in a network folder) and removes them once the host has answered, or at `drop`.

Invariants
1. The tokens of a contract exist only while the host looks for them.
2. Only the driver's thread calls Ray: a call after Ray's end would start a new one.
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
    name: str
    num_cores: int
    """Available to processes that Ray starts there."""


def facts_here() -> HostFacts:
    return HostFacts(socket.gethostname(), usable_cores())


@ray.remote(max_restarts=0, num_cpus=0, max_concurrency=2)
class HostActor:
    """Shell around `HostGuardian`."""

    def __init__(self) -> None:
        self._guardian: HostGuardian | None = None

    def facts(self) -> HostFacts:
        return facts_here()

    def not_seen(self, contract: Contract) -> list[str]:
        return not_seen(contract)

    def guard(self, log_dir: str) -> None:
        """Starts the guardian: from now on nothing of the run outlives its driver here. `log_dir` is shared."""
        name = socket.gethostname()
        setup_logging(Path(log_dir) / f"host_{name}.log", crashes=True)
        self._guardian = HostGuardian(os.environ[RUN_ID_ENV], log_path=Path(log_dir) / f"guardian_{name}.log")

    def take_up(self, contract: Contract, log_dir: str) -> list[str]:
        """For a host that came back: returns what it does not see; if it sees everything, starts the guardian."""
        problems = not_seen(contract)
        if not problems:
            self.guard(log_dir)
        return problems

    def watching(self) -> None:
        """Returns when no guardian watches here any more and none will start."""
        assert self._guardian is not None, "watching() before guard()"
        self._guardian.wait()

    def close(self) -> None:
        """Ends what is left of the run here, except this process."""
        if self._guardian is not None:
            self._guardian.close()
            self._guardian = None


logger = logging.getLogger(__name__)

EMPTY_LIMIT_S = 120.0
"""For the guardian to end what is left on its host, which takes 15 s."""
TOKENS_LIMIT_S = 5.0
"""For the removal of tokens at the end of the run."""


class HostHandle:
    def __init__(self, node_id: str, host: str, *, limit_s: float) -> None:
        """Starts the actor. `host`: for messages. `limit_s`: of each of its answers (--engine-start-timeout-s): the
        process starts, imports, and may wait for a shared folder.
        """
        self._node_id, self._host, self._limit_s = node_id, host, limit_s
        actor: Any = HostActor.options(**on_node(node_id)).remote()  # type: ignore[attr-defined]
        self.actor = introduce(actor, Process("the owner of the guardian", host))
        self._watching: Any = None
        """The answer to `watching`; there when no guardian watches any more."""
        self._contract: Future[Contract] = Future()
        self._answered = threading.Event()
        self._holder: threading.Thread | None = None
        """Writes and removes the tokens."""
        self._log_dir = Path()
        self._asked: Any = None
        self._asked_at = 0.0

    def guarded(self) -> None:
        """The actor has started a guardian; `watches` says for how long."""
        self._watching = self.actor.watching.remote()

    def take_up(self, args: Args, log_dir: Path) -> None:
        """Makes the actor look for the shared folders and start a guardian; `unseen` says how that goes."""

        def keep_tokens() -> None:
            try:
                with contract_of(args, log_dir.parent, under_way=True) as contract:
                    self._contract.set_result(contract)
                    self._answered.wait()
            except BaseException as error:  # `unseen` raises it
                if self._contract.done():
                    logger.warning("files to check the shared folders of host %s are left: %s", self._node_id, error)
                else:
                    self._contract.set_exception(error)

        self._log_dir = log_dir
        self._holder = threading.Thread(target=keep_tokens, name=f"host {self._node_id[:8]}", daemon=True)
        self._holder.start()

    def unseen(self) -> list[str] | None:
        """The shared folders that the host does not see; empty if it is guarded; None before its answer. Never waits.

        Raises `SlimeError` or `OSError` if there is no guardian.
        """
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
        """Ends the actor at once. Never waits, never raises."""
        self._answered.set()
        ray.kill(self.actor)

    def close(self) -> None:
        """Ends what is left of the run on the host. Never raises."""
        if self._holder is not None and self._watching is None:  # no other process of the run is there
            self.drop()
            self._holder.join(TOKENS_LIMIT_S)
            return
        try:
            wait_for([self.actor.close.remote()], for_what=f"host {self._host} to be empty", limit_s=EMPTY_LIMIT_S)
        except SlimeError as error:  # Ray ends the actor with the driver, and then its guardian ends the run there
            logger.warning("host %s did not confirm that it is empty: %s", self._node_id, str(error).splitlines()[0])


class RayNodes:
    def __init__(self, args: Args, *, log_dir: Path) -> None:
        self._args, self._log_dir = args, log_dir

    def living(self) -> dict[str, list[str]]:
        """Address -> living nodes there."""
        found: dict[str, list[str]] = {}
        for node in ray.nodes():
            if node["Alive"]:
                found.setdefault(node["NodeManagerAddress"], []).append(node["NodeID"])
        return found

    def take_up(self, node_id: str) -> HostHandle:
        """Starts an actor there that checks the shared folders and starts a guardian. Never waits."""
        handle = HostHandle(node_id, node_id[:8], limit_s=self._args.engine_start_timeout_s)
        handle.take_up(self._args, self._log_dir)
        return handle
