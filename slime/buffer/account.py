"""Bookkeeping of the Data Buffer: the next ids, the groups in flight, and the outcome of every settled group.

Invariants
1. `group_index` and `index` only increase over a run and are never reused, even after a resume.
2. A group is settled once, and only while in flight. Anything else raises a `LedgerError` with the group's state.
3. Every group is trained, filtered, failed, buffered or in flight:
   `issued == trained + sum(filtered) + sum(failed) + buffered + in_flight`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.buffer.groups import Issued, Origin
from slime.core.errors import LedgerError


@dataclass(frozen=True, slots=True)
class Ledger:
    """A snapshot of the number of groups in each state, counted over the whole run, including resumes."""

    issued: int
    trained: int
    filtered: Mapping[str, int]
    """Reason -> groups dropped on purpose."""
    failed: Mapping[str, int]
    """Reason -> groups that failed."""
    buffered: int
    """Groups waiting to be issued again."""
    in_flight: int
    """Issued groups that are not settled: being generated, or generated but not yet trained."""
    returned: Mapping[str, int]
    """Reason -> number of times that a group was put back. Not part of invariant 3."""

    @property
    def accounted(self) -> int:
        """The right-hand side of invariant 3."""
        settled = self.trained + sum(self.filtered.values()) + sum(self.failed.values())
        return settled + self.buffered + self.in_flight

    def check(self) -> None:
        """Raises `LedgerError` if invariant 3 does not hold."""
        if self.issued != self.accounted:
            raise LedgerError(
                f"{self.issued} groups were issued, but {self.accounted} are accounted for ({self}). A group was lost "
                "or counted twice, so the next checkpoint cannot be trusted; report this with the run folder"
            )

    def metrics(self) -> dict[str, float]:
        out: dict[str, float] = {
            "data/issued": self.issued,
            "data/trained": self.trained,
            "data/buffered": self.buffered,
            "data/in_flight": self.in_flight,
        }
        for name, counts in (("filtered", self.filtered), ("failed", self.failed), ("returned", self.returned)):
            out[f"data/{name}"] = sum(counts.values())
            out.update({f"data/{name}/{reason}": n for reason, n in counts.items()})
        return out


class Account:
    """Counters for the whole run. The buffer itself counts buffered groups."""

    def __init__(self, is_buffered: Callable[[int], bool]) -> None:
        """`is_buffered` tells whether a group is in the buffer. Used only for error messages."""
        self._is_buffered = is_buffered
        self.next_group_index = 0
        self.next_index = 0
        self.num_issued = 0
        self.num_trained = 0
        self.filtered: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.returned: Counter[str] = Counter()
        self.in_flight: dict[int, Issued] = {}
        """Groups in flight, in the order in which they were issued."""
        self.origins: dict[int, Origin] = {}
        """Origins of unsettled groups that the buffer created itself."""

    def add_group(self, num_executions: int) -> tuple[int, int]:
        """Counts a new group. Returns its `group_index` and the `index` of its first execution."""
        ids = self.next_group_index, self.next_index
        self.next_group_index += 1
        self.next_index += num_executions
        self.num_issued += 1
        return ids

    def add_foreign_group(self, group_index: int, last_index: int) -> None:
        """Counts a new group that already has ids, which must be higher than all earlier ones."""
        self.next_group_index, self.next_index = group_index + 1, last_index + 1
        self.num_issued += 1

    def drop(self, group_indices: Iterable[int], reason: str) -> None:
        """Counts buffered groups dropped on purpose."""
        for index in group_indices:
            self.origins.pop(index, None)
            self.filtered[reason] += 1

    def settle(self, group_indices: Iterable[int], verb: str) -> int:
        """Removes groups from `in_flight` and returns their number. Raises `LedgerError` if one is not in flight."""
        indices = list(group_indices)
        self.require_in_flight(indices, verb)
        for index in indices:
            del self.in_flight[index]
            self.origins.pop(index, None)
        return len(indices)

    def require_in_flight(self, group_indices: Sequence[int], verb: str) -> None:
        """Raises `LedgerError` unless each group is in flight and listed once."""
        repeated = sorted(index for index, count in Counter(group_indices).items() if count > 1)
        if repeated:
            raise LedgerError(f"groups {repeated} would be {verb} more than once; list each group once")
        stray = [index for index in group_indices if index not in self.in_flight]
        if not stray:
            return
        states = {index: self._state_of(index) for index in stray[:8]}
        raise LedgerError(
            f"groups {states} are not in flight and cannot be {verb}; settle each issued group exactly once"
        )

    def _state_of(self, group_index: int) -> str:
        if self._is_buffered(group_index):
            return "buffered"
        return "already settled" if 0 <= group_index < self.next_group_index else "never issued"

    def ledger(self, *, num_buffered: int) -> Ledger:
        return Ledger(
            issued=self.num_issued,
            trained=self.num_trained,
            filtered=dict(self.filtered),
            failed=dict(self.failed),
            buffered=num_buffered,
            in_flight=len(self.in_flight),
            returned=dict(self.returned),
        )

    def figures(self) -> dict[str, Any]:
        """Returns the counters for a checkpoint as a JSON-serializable dict, without the groups in flight."""
        return {
            "next_group_index": self.next_group_index,
            "next_index": self.next_index,
            "issued": self.num_issued,
            "trained": self.num_trained,
            "filtered": dict(self.filtered),
            "failed": dict(self.failed),
            "returned": dict(self.returned),
            "origins": [[i, o.row, o.first_index, o.num_executions] for i, o in self.origins.items()],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores saved `figures`. No group is in flight afterwards."""
        self.next_group_index, self.next_index = state["next_group_index"], state["next_index"]
        self.num_issued, self.num_trained = state["issued"], state["trained"]
        self.filtered, self.failed = Counter(state["filtered"]), Counter(state["failed"])
        self.returned = Counter(state["returned"])
        self.origins = {i: Origin(row, first, count) for i, row, first, count in state["origins"]}
        self.in_flight = {}
