"""Membership: the one list of engines, with a generation number that grows with every change.

Consumes: changes, by its owner alone, on one thread. Produces: the list as it is now, and calls to those who follow it,
in the order of their subscription, before `change` returns. Waits for nothing.

Invariants
1. Numbers of engines are their places in the list; none is ever taken out.
2. The same generation means the same list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from slime.fleet.engine import Engine, State

Follower = Callable[[Engine, Engine], None]
"""Called with each change: the engine before it, and after."""


class Membership:
    """All engines of a run."""

    def __init__(self, engines: Iterable[Engine] = ()) -> None:
        self._engines = list(engines)
        assert [e.index for e in self._engines] == list(range(len(self._engines))), "numbers are places"
        self._generation = 0
        self._followers: list[Follower] = []

    @property
    def engines(self) -> tuple[Engine, ...]:
        """All of them, as they are now."""
        return tuple(self._engines)

    @property
    def generation(self) -> int:
        """How many changes there were."""
        return self._generation

    def __getitem__(self, index: int) -> Engine:
        return self._engines[index]

    def of(self, *states: State) -> tuple[Engine, ...]:
        """Those in one of these states."""
        return tuple(engine for engine in self._engines if engine.state in states)

    def follow(self, follower: Follower) -> None:
        """Tells `follower` of every change from now on."""
        self._followers.append(follower)

    def add(self, engine: Engine) -> None:
        """Puts a new engine at the end of the list."""
        assert engine.index == len(self._engines), "numbers are places"
        self._engines.append(engine)
        self._generation += 1

    def change(self, index: int, state: State, **changes: Any) -> Engine:
        """Puts one engine into another state, and returns it so."""
        before = self._engines[index]
        after = self._engines[index] = before.moved(state, **changes)
        self._generation += 1
        for follower in self._followers:
            follower(before, after)
        return after
