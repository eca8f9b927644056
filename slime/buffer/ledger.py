"""The ledger: every prompt group ever issued is trained, filtered, failed, waiting or being worked on. Exactly one.

`issued == trained + sum(filtered) + sum(failed) + buffered + in_flight`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slime.core.errors import LedgerError


@dataclass(frozen=True, slots=True)
class Ledger:
    """A snapshot of the account; all figures count groups since the start of the run, resumes included."""

    issued: int
    """Distinct groups ever created."""
    trained: int
    filtered: Mapping[str, int]
    """Reason -> groups dropped on purpose."""
    failed: Mapping[str, int]
    """Reason -> groups given up."""
    buffered: int
    """Waiting to be issued again."""
    in_flight: int
    """Issued and not settled: being generated, or generated and not yet trained."""
    returned: Mapping[str, int]
    """Reason -> times that a group was put back. Events, not groups: no part of the equation."""

    @property
    def accounted(self) -> int:
        """Right side of the equation."""
        settled = self.trained + sum(self.filtered.values()) + sum(self.failed.values())
        return settled + self.buffered + self.in_flight

    def check(self, *, max_in_flight: int | None = None) -> None:
        """Raises `LedgerError` if the equation does not hold or more than `max_in_flight` groups are out."""
        if self.issued != self.accounted:
            raise LedgerError(
                f"got {self.issued} groups issued and {self.accounted} accounted for ({self}), because one was lost or "
                "counted twice; do: report this with the run folder, the next checkpoint cannot be trusted"
            )
        if max_in_flight is not None and self.in_flight > max_in_flight:
            raise LedgerError(
                f"got {self.in_flight} groups in flight where at most {max_in_flight} can be, because a rollout took "
                "groups and neither returned nor dropped them; do: put them back or mark them filtered or failed"
            )

    def metrics(self) -> dict[str, float]:
        """Flat figures for the log."""
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
