"""`RequestScope`: the requests of one rollout, wherever they are in user code, so that the run can end them together.

Tasks inherit it through `REQUEST_SCOPE`. `client` puts the tries in it that run, and tells the execution of a request
that was taken back (`transcript`). All on one event loop.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.rollout.engines import EnginePool
    from slime.rollout.upstream import Try


@dataclass(slots=True, eq=False)
class RequestScope:
    """The requests of one rollout. The run takes them back through it: their callers get `TakenBack`."""

    tries: set[Try] = field(default_factory=set)
    """Those that are with an engine now."""
    pools: set[EnginePool] = field(default_factory=set)
    """Those that its requests have asked for a place."""
    aborted: bool = False
    """Its requests are taken back, and no other is sent."""
    hands_back: bool = False
    """Its requests are taken back; others are sent after the pause."""

    number: int = field(default_factory=count(1).__next__)
    """Of this process; the ids of its requests hold it."""

    @property
    def rids(self) -> set[str]:
        """Ids of the requests that are with an engine now."""
        return {one.rid for one in self.tries}


REQUEST_SCOPE: ContextVar[RequestScope | None] = ContextVar("slime_request_scope", default=None)
