"""Which groups the trainer has: the account of batches that are handed out and not yet trained.

Invariants
1. The groups of a batch stay in flight in the buffer until `commit`; a save before it issues them again on resume.
2. After each `hand_out` and `commit` the ledger balances, or `LedgerError`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from slime.buffer.data_buffer import DataBuffer
from slime.core.errors import LedgerError
from slime.core.sample import Sample

logger = logging.getLogger(__name__)


class BatchAccount:
    """Step -> the groups of its batch."""

    def __init__(self, buffer: DataBuffer, *, trains: bool) -> None:
        """`trains`: each commit makes a new weight version."""
        self._buffer, self._trains = buffer, trains
        self._handed_out: dict[int, list[int]] = {}
        self.last_step: int | None = None
        """The newest step that is trained."""

    def in_flight(self) -> set[int]:
        """The groups that are with somebody now."""
        return set(self._buffer.in_flight)

    def hand_out(self, rollout_id: int, groups: Sequence[Sequence[Sample]], *, before: set[int] | None) -> None:
        """Remembers the groups of a batch.

        `before`: what was in flight before its step; what came to it since, and is not in the batch, was forgotten by a
        user's function and is filtered. None for a schedule that keeps groups in flight between steps.
        """
        indices = sorted({s.group_index for group in groups for s in group if s.group_index is not None})
        dropped = [] if before is None else sorted(self.in_flight() - before - set(indices))
        if dropped:
            logger.info("%d groups were issued to the rollout function and not returned by it", len(dropped))
            self._buffer.mark_filtered(dropped, "not_returned")
        self._handed_out[rollout_id] = indices
        self._buffer.ledger().check()

    def commit(self, rollout_id: int) -> None:
        """The step is trained: its groups are settled. Raises `LedgerError`."""
        if rollout_id not in self._handed_out:
            raise LedgerError(f"got a commit of step {rollout_id}, which was not generated, or is already committed")
        self._buffer.mark_trained(self._handed_out.pop(rollout_id))
        self.last_step = rollout_id
        self._buffer.weight_version += self._trains
        self._buffer.ledger().check()

    def clear(self) -> None:
        """Forgets what was handed out; the buffer was loaded, and issues it again."""
        self._handed_out.clear()
