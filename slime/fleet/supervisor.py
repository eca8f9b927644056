"""The supervisor: finds engines that died or hang, starts them again, and says which of them want weights.

Consumes: what its port finds (`troubles`, `started`), whenever its owner calls `tend`. Produces: changes of the
membership. Waits for nothing; its owner calls it about twice a second, also while it waits for something else itself.

Invariants
1. An engine in trouble gets no more requests before anything else is done about it.
2. One that was started again gets requests only after a weight sync that verified it (`wants_weights`, `synced`).
3. An engine that ends `MAX_FAILURES` times without having been ready in between ends the run: it will not get better.
   One that somebody else starts does not: they may do it right the next time, and others may serve meanwhile.
4. One whose host is lost is not started before it is there again, and its loss does not count. If all engines of a
   model are such, the run ends: nobody would answer for it, however well other models are served.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from slime.core.errors import EngineError
from slime.core.ports import WeightVersion
from slime.core.text import shorten
from slime.fleet.engine import FROZEN, Engine, State
from slime.fleet.membership import Membership
from slime.fleet.port import EnginePort

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""In a row, without having been ready."""
PAUSE_S = 1.0
"""Between the end of an engine and its next start, doubled with every failure in a row."""
LONGEST_PAUSE_S = 30.0
REASON_CHARS = 400
"""Of what is wrong with an engine, in one line of the log."""


class Supervisor:
    """Keeps the engines of a membership alive."""

    def __init__(
        self,
        membership: Membership,
        port: EnginePort,
        *,
        restarts: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`restarts`: else an engine in trouble ends the run."""
        self._membership, self._port, self._restarts, self._clock = membership, port, restarts, clock
        self._failures: Counter[int] = Counter()
        self._again_at: dict[int, float] = {}
        self._hostless: set[int] = set()
        """Dead ones that wait for their hosts."""
        self._missed: set[int] = set()
        """Those that were lost and do not serve again yet."""

    def tend(self) -> None:
        """Looks once. Raises `EngineError` if an engine cannot be kept alive."""
        for index, reason in self._port.troubles().items():
            if self._membership[index].answers:
                self.lost(self._membership[index], reason)
        for engine in self._membership.of(State.DEAD):
            if self._clock() >= self._again_at[engine.index] and self._can_start(engine):
                again = self._membership.change(engine.index, State.STARTING, incarnation=engine.incarnation + 1)
                logger.info("engine %d is %s", engine.index, "waited for" if engine.external else "started again")
                self._port.start(again)
        for engine, url in self._port.newcomers():
            self._membership.add(engine)
            self.up(engine.index, url)
        for engine in self._membership.of(State.STARTING):
            if engine.incarnation:  # the start of the run waits for the first ones itself
                self._welcome(engine)

    def _can_start(self, engine: Engine) -> bool:
        """Whether its host is there. Raises `EngineError` if that holds for none of its kind, and none lives: half of a
        pair answers for nobody.
        """
        lost = {e.index for e in self._membership.of(State.DEAD) if not self._port.has_host(e.index)}
        kind = (engine.model, engine.worker)
        serving = {e.index for e in self._membership.engines if (e.model, e.worker) == kind}
        if serving <= lost:
            raise EngineError(
                f"no engine of model {engine.model} is left: the hosts of all {len(serving)} are lost; {engine.reason}"
            )
        for index in lost - self._hostless:
            logger.warning("engine %d waits for its host, which is lost; the run goes on with the others", index)
            self._failures.pop(index, None)
        self._hostless = lost
        return engine.index not in lost

    def up(self, index: int, url: str) -> None:
        """An engine answers. It wants weights, or has what it serves from its checkpoint."""
        engine = self._membership.change(index, State.SYNCING, url=url)
        if engine.role == FROZEN:
            self.synced([engine], 0)

    def wants_weights(self) -> tuple[Engine, ...]:
        """Those that answer and serve no version."""
        return self._membership.of(State.SYNCING, State.TAINTED)

    def syncing(self, engines: Sequence[Engine]) -> None:
        """A weight sync to these begins."""
        for engine in engines:
            if engine.state is not State.SYNCING:
                self._membership.change(engine.index, State.SYNCING)

    def synced(self, engines: Sequence[Engine], version: WeightVersion) -> None:
        """These serve a version; one that died or was replaced meanwhile does not."""
        for engine in engines:
            now = self._membership[engine.index]
            if now.incarnation == engine.incarnation and now.state is State.SYNCING:
                self._membership.change(engine.index, State.READY, version=version)
                self._failures.pop(engine.index, None)
                if engine.index in self._missed:
                    self._missed.remove(engine.index)
                    logger.info("engine %d serves again, at version %d", engine.index, version)

    def tainted(self, engines: Sequence[Engine], reason: str) -> None:
        """A weight sync to these failed."""
        for engine in engines:
            now = self._membership[engine.index]
            if now.incarnation == engine.incarnation and now.state is State.SYNCING:
                self._membership.change(engine.index, State.TAINTED, reason=reason)

    def _welcome(self, engine: Engine) -> None:
        if not self._port.has_host(engine.index):  # it would start for ever
            self.lost(engine, "its host was lost while it was starting")
            return
        try:
            url = self._port.started(engine.index)
        except EngineError as error:
            self.lost(engine, str(error))
            return
        if url is not None:
            logger.info("engine %d answers again, at %s", engine.index, url)
            self.up(engine.index, url)

    def lost(self, engine: Engine, reason: str, *, longest_s: float = LONGEST_PAUSE_S) -> None:
        """One that answers, or should have, is given up; it is started again later. Raises `EngineError` if it cannot
        be kept alive. `longest_s`: of the pauses before an engine of somebody else is taken again.
        """
        self._port.dismiss(engine)
        self._membership.change(engine.index, State.DEAD, reason=reason)
        self._failures[engine.index] += self._port.has_host(engine.index)
        self._missed.add(engine.index)
        failures = self._failures[engine.index]
        if not self._restarts:
            raise EngineError(
                f"engine {engine.index} was lost, and --no-use-fault-tolerance asks to end then: {reason}"
            )
        if failures >= MAX_FAILURES and not engine.external:
            raise EngineError(
                f"engine {engine.index} ended {failures} times without having served in between, so another start "
                f"would not help; the last time: {reason}"
            )
        longest_s = longest_s if engine.external else LONGEST_PAUSE_S
        pause_s = min(PAUSE_S * 2.0 ** min(max(failures - 1, 0), 30), longest_s)
        self._again_at[engine.index] = self._clock() + pause_s
        logger.warning("engine %d was lost: %s", engine.index, shorten(reason, REASON_CHARS))
