"""`Loads`: which of many engines has the least to do, found without looking at all of them.

Consumes: engines whose number of tries has changed (`put`), or that are none to choose from any more (`drop`).
Produces: the one with the least (`least`). Waits for nothing.
"""

from __future__ import annotations

from collections import defaultdict

from slime.rollout.upstream import Upstream


class Loads:
    """Engines in buckets, by the number of their tries."""

    def __init__(self) -> None:
        self._buckets: defaultdict[int, dict[Upstream, None]] = defaultdict(dict)
        self._load: dict[Upstream, int] = {}
        self._least = 0
        """No bucket below it has an engine."""

    def __len__(self) -> int:
        return len(self._load)

    def put(self, upstream: Upstream) -> None:
        """It may be chosen, by the number of tries that it has now."""
        self.drop(upstream)
        load = len(upstream.tries)
        self._load[upstream] = load
        self._buckets[load][upstream] = None
        self._least = min(self._least, load)

    def drop(self, upstream: Upstream) -> None:
        """It may not be chosen."""
        load = self._load.pop(upstream, None)
        if load is not None:
            bucket = self._buckets[load]
            del bucket[upstream]
            if not bucket:
                del self._buckets[load]

    def least(self) -> Upstream | None:
        """The one that has had the least number of tries for longest; None if there is none."""
        if not self._load:
            self._least = 0
            return None
        while self._least not in self._buckets:
            self._least += 1
        return next(iter(self._buckets[self._least]))
