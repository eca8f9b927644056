"""What executions do with their time, in the trace of their process: some of them, on a few rows of their own.

    from slime.rollout.traced import traced
    with traced("tool: search", query=query):      # in a generate function; of an execution that is not traced: nothing
        ...

Tasks inherit the row of their execution through a context variable. Consumes: the blocks of `traced_execution` and
`traced`. Produces: spans (`observability.spans`). Waits for nothing; all on one event loop.

Invariants
1. Spans of a row never overlap partly: blocks that run side by side in one execution have rows beside each other.
2. At most `ROWS` executions are traced at a time, of which one begins in `EVERY_S` at most, however many there are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from slime.observability.spans import note_span

ROWS, EVERY_S = 4, 1.0


class _Row:
    """Of one traced execution."""

    __slots__ = ("lanes", "name")

    def __init__(self, name: str) -> None:
        self.name, self.lanes = name, set[int]()

    @contextmanager
    def lane(self) -> Iterator[str]:
        """The first one that is free."""
        number = next(n for n in range(len(self.lanes) + 1) if n not in self.lanes)
        self.lanes.add(number)
        try:
            yield self.name if number == 0 else f"{self.name}.{number}"
        finally:
            self.lanes.discard(number)


_ROW: ContextVar[_Row | None] = ContextVar("slime_traced_row", default=None)


class _Rows:
    """Those of this process."""

    def __init__(self) -> None:
        self.free = list(range(ROWS))
        self.next_s = 0.0


_ROWS = _Rows()


@contextmanager
def traced_execution(**facts: Any) -> Iterator[None]:
    """The block is an execution, which is traced if one is due. `facts`: for the trace."""
    now_s = time.monotonic()
    if not _ROWS.free or now_s < _ROWS.next_s:
        yield
        return
    number, _ROWS.next_s = _ROWS.free.pop(0), now_s + EVERY_S
    token = _ROW.set(_Row(f"execution row {number}"))
    try:
        with traced("execution", **facts):
            yield
    finally:
        _ROW.reset(token)
        _ROWS.free.append(number)


@contextmanager
def traced(name: str, **facts: Any) -> Iterator[None]:
    """The block is a span of its execution, if that one is traced; also when it raises. `facts`: for the trace."""
    row = _ROW.get()
    if row is None:
        yield
        return
    with row.lane() as lane:
        begin_s = time.time()
        try:
            yield
        except BaseException as error:
            facts["error"] = type(error).__name__
            raise
        finally:
            note_span(name, begin_s, time.time(), row=lane, **facts)
