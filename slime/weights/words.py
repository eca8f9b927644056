"""The word from one training rank to the next that it is its turn, and whether all went well so far: through a store.

Consumes and produces: a word for each turn of a weight sync. Waits for: who tells it, with a limit for each turn in
between. Is woken by: the word.

A store, and not messages between two ranks: who waits no longer leaves nothing behind that a later word could run into,
and who tells waits for nobody.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from slime.core.errors import DeadlineExceeded

GOOD, BAD = b"1", b"0"
AT_THE_START = 3
"""Limits for what the conductor does before the first turn: pause, flush, join."""
IN_A_TURN = 2
"""Limits for a turn: join, deliver."""


class Words:
    """One rank's ear and mouth. Every rank has its own client of the store, since one that waits keeps its client."""

    def __init__(self, store: Any, *, limit_s: float) -> None:
        """`store`: of torch (`torch.distributed.Store`). `limit_s`: of each call to engines."""
        self._store, self._limit_s = store, limit_s
        self._number = 0

    def begin(self) -> None:
        """Every rank, at the start of each weight sync: what was not heard of the one before is never heard."""
        self._number += 1

    def tell(self, turn: int, good: bool) -> None:
        """Lets a turn begin, or says that nothing may be sent in it."""
        self._store.set(self._key(turn), GOOD if good else BAD)

    def hear(self, turn: int, num_turns: int) -> bool:
        """Whether all went well before `turn`, behind at most `num_turns` turns of others.

        Raises `DeadlineExceeded`, or what the store raises if the rank that keeps it is gone (`DistNetworkError`).
        """
        from torch.distributed import DistStoreError

        limit_s = (AT_THE_START + IN_A_TURN * num_turns) * self._limit_s
        key = self._key(turn)
        try:
            self._store.wait([key], timedelta(seconds=limit_s))
        except DistStoreError as error:
            what = f"{num_turns} turns of other training ranks, before turn {turn}"
            raise DeadlineExceeded.waiting(owner="weight sync", for_what=what, limit_s=limit_s) from error
        good = bool(self._store.get(key) == GOOD)
        self._store.delete_key(key)
        return good

    def _key(self, turn: int) -> str:
        return f"{self._number}/{turn}"
