"""The Data Buffer: issues prompt groups, takes them back with their partial work, and accounts for each.

The rollout gets groups to work on (`get_groups`), returns them (`put_back`), drops them (`mark_filtered`,
`mark_failed`) or finishes them ahead of a step (`put_finished`, `take_finished`). The driver confirms after the
optimizer step (`mark_trained`), then saves. One lock, held briefly, guards the state, so that a user's rollout function
may call the buffer from its own thread. Calls wait only for this lock.

Life of a group: issued -> in flight -> trained | filtered | failed, or -> buffered (unfinished, or finished and waiting
to be trained) -> in flight again.

Invariants
1. Each group is in exactly one of these states: `ledger().check()` passes after every call.
2. `group_index` and `index` increase over the whole run and are never used twice, also after a resume.
3. Returned groups are served before new prompts, first in, first out.
4. A resumed run continues as if it had never stopped. Groups in flight at the save are issued again first, in the
   state in which they were last issued or noted. No prompt is skipped, and none is trained twice, because training is
   confirmed before saving.
5. With `max_staleness`, no group that leaves the buffer has a token from weights more than that many versions before
   `weight_version`; an older group starts over from its prompt and counts as returned for the reason "stale".
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slime.buffer.account import Account, Ledger
from slime.buffer.groups import (
    BLANK,
    BufferFilter,
    GroupOrRecord,
    GroupRecord,
    Issued,
    Origin,
    apply_filter,
    flatten,
    group_index_of,
    make_group,
    note_quarantines,
    num_quarantines,
    oldest_version,
    record_of,
    reset_group,
)
from slime.buffer.prompts import Prompts, PromptWalk
from slime.buffer.snapshot import SavedState, Snapshot, check_dataset
from slime.core.errors import CheckpointError, DataError
from slime.core.files import read_checkpoint_json
from slime.core.sample import Group, Sample

logger = logging.getLogger(__name__)


class DataBuffer:
    """Issues groups of samples of `prompts`, or of blank samples if `prompts` is None."""

    def __init__(
        self,
        prompts: Prompts | None,
        *,
        n_samples_per_prompt: int = 1,
        shuffle: bool = False,
        seed: int = 42,
        buffer_filter: BufferFilter | None = None,
    ) -> None:
        """Raises `DataError` on an empty dataset or `n_samples_per_prompt < 1`."""
        if n_samples_per_prompt < 1:
            raise DataError(f"n_samples_per_prompt is {n_samples_per_prompt}; it must be at least 1")
        self._walk = None if prompts is None else PromptWalk(prompts, shuffle=shuffle, seed=seed)
        self._n_samples_per_prompt = n_samples_per_prompt
        self._buffer_filter = buffer_filter
        self.max_staleness: int | None = None
        self.weight_version = 1
        """The weight version on which the next batch is trained. Each trained step produces the next version."""
        self._lock = threading.RLock()
        self._queue: list[GroupRecord] = []
        self._finished: list[GroupRecord] = []
        self._shown: dict[int, Group] = {}
        """Queued groups that the user's filter has seen and may have changed, so their records are stale."""
        self._account = Account(self._is_buffered)

    # ---- issuing -------------------------------------------------------------------------------------------------

    def get_groups(self, n: int) -> list[Group]:
        """Issues exactly `n` groups: first returned groups in the order of their return, then new prompts."""
        if n < 0:
            raise DataError(f"{n} groups were requested; the number must not be negative")
        with self._lock:
            taken = self._take_buffered(n)
            groups = [self._not_stale(group) for group in taken + self._new_groups(n - len(taken))]
            for group in groups:
                self._stamp(group)
            return groups

    def _stamp(self, group: Group) -> None:
        for sample in group.samples:
            if sample.started_version is None:
                sample.started_version = self.weight_version

    def _issue(self, group: Group, record: GroupRecord | None = None) -> None:
        """`record`: the record of the group in its current state, if there is one."""
        self._account.in_flight[group.group_index] = Issued(group.attempts, record or GroupRecord.of(group))

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Calls `get_groups` for users' rollout functions. Returns a list of samples per prompt."""
        return [list(group.samples) for group in self.get_groups(num_samples)]

    def _new_groups(self, n: int) -> list[Group]:
        groups = []
        for _ in range(n):
            row = None if self._walk is None else self._walk.next_row()
            group_index, first_index = self._account.add_group(self._n_samples_per_prompt)
            origin = Origin(row, first_index, self._n_samples_per_prompt)
            self._account.origins[group_index] = origin
            self._account.in_flight[group_index] = Issued(0, None)
            groups.append(self._make(group_index, origin, 0))
        return groups

    def _make(self, group_index: int, origin: Origin, attempts: int) -> Group:
        row = BLANK if self._walk is None or origin.row is None else self._walk.prompts[origin.row]
        return make_group(row, group_index, origin, attempts)

    def _take_buffered(self, n: int) -> list[Group]:
        """Issues up to `n` queued groups; the user's filter, if any, chooses them."""
        if self._buffer_filter is None or not self._queue or n == 0:
            taken, self._queue = self._queue[:n], self._queue[n:]
            return [self._issue_again(record) for record in taken]
        groups = [self._shown.get(record.group_index) or record.group() for record in self._queue]
        chosen, kept = apply_filter(self._buffer_filter, groups, n)
        again = [(group, GroupRecord.of(group)) for group in chosen]
        known = {record.group_index: record for record in self._queue}
        self._account.drop(known.keys() - {g.group_index for g in (*chosen, *kept)}, "buffer_filter")
        self._queue = [known[group.group_index] for group in kept]
        self._shown = {group.group_index: group for group in kept}
        for group, record in again:
            self._issue(group, record)
        return chosen

    def _issue_again(self, record: GroupRecord) -> Group:
        group = record.group()
        self._issue(group, record)
        return group

    def start_over(self, group: Group) -> Group:
        """Discards the work on a group in flight. Raises `LedgerError` for a group that is not in flight."""
        with self._lock:
            self._account.require_in_flight([group.group_index], "started over")
            fresh = self._fresh(group, self._account.in_flight[group.group_index].attempts)
            self._issue(fresh)
            self._stamp(fresh)
            return fresh

    def note(self, group: GroupOrRecord) -> None:
        """Records the current state of a group in flight, for a resumed run. Raises like `put_back`."""
        with self._lock:
            self._account.require_in_flight([group.group_index], "noted")
            self._account.in_flight[group.group_index] = Issued(group.attempts, record_of(group))

    def _is_too_old(self, oldest: int | None) -> bool:
        if self.max_staleness is None or oldest is None:
            return False
        return self.weight_version - oldest > self.max_staleness

    def _not_stale(self, group: Group) -> Group:
        if not self._is_too_old(oldest_version(group)):
            return group
        self._account.returned["stale"] += 1
        return self.start_over(group)

    def _fresh(self, group: Group, attempts: int) -> Group:
        """Makes the group again from its dataset row, or resets one without a row. Keeps its number of quarantines."""
        origin = self._account.origins.get(group.group_index)
        if origin is not None:
            return note_quarantines(self._make(group.group_index, origin, attempts), num_quarantines(group))
        return replace(reset_group(group), attempts=attempts)

    # ---- taking back and settling --------------------------------------------------------------------------------

    def put_back(self, groups: Sequence[GroupOrRecord], reason: str) -> None:
        """Takes back groups in flight, with their work, to be issued before new prompts; adds one to `attempts`.

        Takes all groups or none: raises `LedgerError` for a group that is not in flight, and `DataError` for a group
        that is not JSON-serialisable and so could not be saved.
        """
        with self._lock:
            self._account.require_in_flight([g.group_index for g in groups], "put back")
            back: list[tuple[GroupOrRecord, GroupRecord]] = []
            for group in groups:
                attempts = self._account.in_flight[group.group_index].attempts + 1
                again: GroupOrRecord = replace(group, attempts=attempts)
                back.append((again, record_of(again)))
            for again, _ in back:
                del self._account.in_flight[again.group_index]
            self._account.returned[reason] += len(back)
            self._keep(back)

    def put_finished(self, group: GroupOrRecord) -> None:
        """Takes a finished group that was in flight, to be trained later. Raises like `put_back`."""
        with self._lock:
            self._account.require_in_flight([group.group_index], "kept as finished")
            self._finished.append(record_of(group, finished=True))
            del self._account.in_flight[group.group_index]

    def take_finished(self, n: int) -> list[GroupRecord]:
        """Issues `n` finished groups, oldest weights first, and returns their records; [] if fewer are finished.

        Stale finished groups are queued again and start over from their prompt.
        """
        with self._lock:
            stale = [record.group() for record in self._finished if self._is_too_old(record.oldest)]
            again = [self._fresh(group, group.attempts + 1) for group in stale]
            self._keep([(group, GroupRecord.of(group)) for group in again])
            self._account.returned.update(["stale"] * len(stale))
            self._finished = [record for record in self._finished if not self._is_too_old(record.oldest)]
            self._finished.sort(key=lambda record: self.weight_version if record.oldest is None else record.oldest)
            if len(self._finished) < n:
                return []
            taken, self._finished = self._finished[:n], self._finished[n:]
            for record in taken:
                self._account.in_flight[record.group_index] = Issued(record.attempts, record)
            return taken

    def add_samples(self, groups: Sequence[Sequence[Any]]) -> None:
        """Calls `put_back` for users' rollout functions, with a list of samples per prompt. Flattens fan-out nests.

        Samples without a `group_index` are new work: they get ids and join the queue.
        """
        for nest in groups:
            samples = flatten(nest)
            if {s.group_index for s in samples} == {None}:
                with self._lock:
                    self._keep([self._adopt(nest)])
            else:
                index = group_index_of(samples)
                self.put_back([Group(group_index=index, samples=tuple(samples))], "add_samples")

    def _adopt(self, nest: Sequence[Any]) -> tuple[Group, GroupRecord]:
        """Assigns ids to samples from outside, one per execution (a sample or a list of siblings)."""
        group_index, first_index = self._account.next_group_index, self._account.next_index
        for i, execution in enumerate(nest):
            for sample in flatten([execution]):
                sample.group_index, sample.index = group_index, first_index + i
        group = Group(group_index=group_index, samples=tuple(flatten(nest)))
        record = GroupRecord.of(group)  # may raise, so before the group is counted
        self._account.add_group(len(nest))
        return group, record

    def _keep(self, groups: Sequence[tuple[GroupOrRecord, GroupRecord]]) -> None:
        self._queue.extend(record for _, record in groups)

    def mark_trained(self, group_indices: Iterable[int]) -> None:
        """Settles groups that an optimizer step used. Raises `LedgerError` if one is not in flight (trained twice)."""
        with self._lock:
            self._account.num_trained += self._account.settle(group_indices, "trained")

    def mark_filtered(self, group_indices: Iterable[int], reason: str) -> None:
        """Settles groups dropped on purpose. Raises `LedgerError` for a group that is not in flight."""
        with self._lock:
            self._account.filtered[reason] += self._account.settle(group_indices, "filtered")

    def mark_failed(self, group_indices: Iterable[int], reason: str) -> None:
        """Settles failed groups. Raises `LedgerError` for a group that is not in flight."""
        with self._lock:
            self._account.failed[reason] += self._account.settle(group_indices, "failed")

    def _is_buffered(self, group_index: int) -> bool:
        return any(group.group_index == group_index for group in self._queue + self._finished)

    # ---- the account ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Returns the number of usable rows of the dataset; 0 without a dataset."""
        return 0 if self._walk is None else len(self._walk.prompts)

    @property
    def epoch(self) -> int:
        """Completed passes over the dataset, counted by issued prompts."""
        return 0 if self._walk is None else self._walk.epoch

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Group indices, in the order in which the groups were issued."""
        with self._lock:
            return tuple(self._account.in_flight)

    @property
    def num_buffered(self) -> int:
        """Groups waiting to be issued again, finished ones included."""
        return len(self._queue) + len(self._finished)

    @property
    def num_finished(self) -> int:
        """Groups waiting to be trained."""
        return len(self._finished)

    def ledger(self) -> Ledger:
        with self._lock:
            return self._account.ledger(num_buffered=self.num_buffered)

    def metrics(self) -> dict[str, float]:
        own = getattr(self._walk.prompts, "metrics", dict) if self._walk else dict
        figures = {"data/epoch": float(self.epoch), "data/finished": float(self.num_finished)}
        return {**self.ledger().metrics(), **figures, **own()}

    # ---- saving --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the JSON-serialisable state, a deep copy. Raises `LedgerError` if the ledger does not balance."""
        return self._snapshot().plain()

    def _snapshot(self) -> Snapshot:
        """Returns the current state. Raises `LedgerError` if the ledger does not balance."""
        with self._lock:
            self.ledger().check()
            return Snapshot(
                figures=self._figures(),
                buffered=[
                    GroupRecord.of(self._shown[r.group_index]) if r.group_index in self._shown else r
                    for r in self._queue
                ],
                finished=list(self._finished),
                in_flight=list(self._account.in_flight.items()),
            )

    def _figures(self) -> dict[str, Any]:
        walk = None if self._walk is None else self._walk.state_dict()
        return {"walk": walk, "weight_version": self.weight_version, **self._account.figures()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`. Raises `CheckpointError` if the dataset or its order differs."""
        self._load(SavedState.of(state))

    def _load(self, saved: SavedState) -> None:
        state = saved.state
        check_dataset(state, has_walk=self._walk is not None)
        with self._lock:
            if self._walk is not None:
                self._walk.load_state_dict(state["walk"])
            self._account.load(state)
            again = [
                issued.record or GroupRecord.of(self._make(index, self._account.origins[index], issued.attempts))
                for index, issued in saved.in_flight
            ]
            self._queue = again + saved.buffered
            self._finished = saved.finished
            self._shown = {}
            self.weight_version = state.get("weight_version", self.weight_version)
            self.ledger().check()
        if again:
            logger.info("%d groups were in flight when the buffer was saved; they are issued again first", len(again))

    def begin_save(self, path: Path, *, rollout_id: int | None = None) -> Callable[[], None]:
        """Takes a snapshot. Returns a function that writes the snapshot to `path` and beside it, in any thread."""
        snapshot = self._snapshot()
        return lambda: snapshot.write(path)

    def load(self, path: Path, *, rollout_id: int | None = None) -> None:
        """Restores a save. Raises `CheckpointError` if the file is missing or damaged, or the dataset differs."""
        try:
            self._load(SavedState.of(read_checkpoint_json(path), path))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the buffer state in {path} is damaged: {type(error).__name__}: {error}") from error
