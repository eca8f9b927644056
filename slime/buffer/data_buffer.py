"""The Data Buffer: issues groups of samples, takes them back with partial work, and accounts for every one.

The rollout takes groups to generate (`get_groups`), returns them (`put_back`), drops them (`mark_filtered`,
`mark_failed`), or finishes them ahead of a step (`put_finished`, `take_finished`). After the optimizer step, the driver
confirms the trained groups (`mark_trained`), then saves. A single lock, held briefly, guards the state, so a user's
rollout function can call the buffer from its own thread. Calls block only on this lock.

Life cycle: issued -> in flight -> trained | filtered | failed, or -> buffered (unfinished, or finished and waiting to
be trained) -> in flight again.

Invariants
1. Each group is in exactly one of these states: `ledger().check()` passes after every call.
2. `group_index` and `index` only increase over a run and are never reused, even after a resume.
3. Returned groups are issued before new prompts, in FIFO order.
4. A resumed run continues as if it had never stopped. Groups that were in flight at the save are issued first, in the
   state in which they were last issued or noted. No prompt is skipped, and none is trained twice, because training is
   confirmed before saving.
5. With `max_staleness`, no group leaves the buffer with a token sampled more than that many versions before
   `weight_version`. An older group is reset to its prompt and counts as returned with the reason "stale".
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
from slime.buffer.samplers import Epochs, Prompts, PromptSampler, Walk, task_of, without_ids
from slime.buffer.snapshot import SavedState, Snapshot, check_dataset
from slime.core.errors import CheckpointError, DataError
from slime.core.files import read_checkpoint_json
from slime.core.sample import Group, Sample

logger = logging.getLogger(__name__)


class DataBuffer:
    """Issues groups of samples for `prompts`, or blank samples if `prompts` is None."""

    def __init__(
        self,
        prompts: Prompts | None,
        *,
        n_samples_per_prompt: int = 1,
        shuffle: bool = False,
        seed: int = 42,
        buffer_filter: BufferFilter | None = None,
        sampler: PromptSampler | None = None,
        task_key: str = "task",
    ) -> None:
        """`sampler`: chooses the rows; None: every row once per epoch.

        Raises `DataError` on an empty dataset, one that does not fit the sampler, or `n_samples_per_prompt < 1`.
        """
        if n_samples_per_prompt < 1:
            raise DataError(f"n_samples_per_prompt is {n_samples_per_prompt}; it must be at least 1")
        walk, self._task_key = (sampler or Epochs()).open, task_key
        self._walk: Walk | None = None
        if prompts is not None:
            self._walk = walk(prompts, task_key=task_key, shuffle=shuffle, seed=seed)
        self._n_samples_per_prompt = n_samples_per_prompt
        self._buffer_filter = buffer_filter
        self.max_staleness: int | None = None
        self.weight_version = 1
        """The weight version that the next batch will train. Each trained step produces the next version."""
        self._lock = threading.RLock()
        self._queue: list[GroupRecord] = []
        self._finished: list[GroupRecord] = []
        self._shown: dict[int, Group] = {}
        """Queued groups that the user's filter has seen and may have modified, so their records are outdated."""
        self._account = Account(self._is_buffered)

    # ---- issuing -------------------------------------------------------------------------------------------------

    def get_groups(self, n: int) -> list[Group]:
        """Issues exactly `n` groups: returned groups first, in FIFO order, then new prompts."""
        if n < 0:
            raise DataError(f"the number of requested groups must not be negative, got {n}")
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
        """Marks a group as in flight. `record` is its record, if one exists for the current state."""
        self._account.in_flight[group.group_index] = Issued(group.attempts, record or GroupRecord.of(group))

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Issues groups as lists of samples, for users' rollout functions."""
        return [list(group.samples) for group in self.get_groups(num_samples)]

    def __call__(self, num_samples: int) -> list[list[Sample]]:
        """Issues groups as `get_samples` does, which the public slime passes to --rollout-all-samples-process-path."""
        return self.get_samples(num_samples)

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
        """Issues up to `n` queued groups, chosen by the user's filter if there is one."""
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
        """Resets a group in flight to its prompt. Raises `LedgerError` if the group is not in flight."""
        with self._lock:
            self._account.require_in_flight([group.group_index], "started over")
            fresh = self._fresh(group, self._account.in_flight[group.group_index].attempts)
            self._issue(fresh)
            self._stamp(fresh)
            return fresh

    def note(self, group: GroupOrRecord) -> None:
        """Records the current state of a group in flight, so a resumed run continues there.

        Raises the same errors as `put_back`.
        """
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
        """Recreates a group from its dataset row, or resets one without a row. Keeps the number of quarantines."""
        origin = self._account.origins.get(group.group_index)
        if origin is not None:
            return note_quarantines(self._make(group.group_index, origin, attempts), num_quarantines(group))
        return replace(reset_group(group), attempts=attempts)

    # ---- taking back and settling --------------------------------------------------------------------------------

    def put_back(self, groups: Sequence[GroupOrRecord], reason: str) -> None:
        """Takes back groups in flight with their partial work, to issue them before new prompts. Increments `attempts`.

        All or nothing: raises `LedgerError` if a group is not in flight, and `DataError` if a group is not
        JSON-serializable and so cannot be saved.
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
        """Buffers a finished group, which must be in flight, until it is trained.

        Raises the same errors as `put_back`.
        """
        with self._lock:
            self._account.require_in_flight([group.group_index], "kept as finished")
            self._finished.append(record_of(group, finished=True))
            del self._account.in_flight[group.group_index]

    def take_finished(self, n: int) -> list[GroupRecord]:
        """Issues the `n` finished groups with the oldest weights and returns their records; [] if there are too few.

        Finished groups that have become stale are reset to their prompts and queued again.
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
        """Puts back groups given as lists of samples, for users' rollout functions. Flattens nested fan-out lists.

        Samples without a `group_index` form a new group, which is assigned ids and queued.
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
        """Assigns ids to foreign samples, one `index` per execution (a sample or a list of siblings)."""
        group_index, first_index = self._account.next_group_index, self._account.next_index
        for i, execution in enumerate(nest):
            for sample in flatten([execution]):
                sample.group_index, sample.index = group_index, first_index + i
        group = Group(group_index=group_index, samples=tuple(flatten(nest)))
        record = GroupRecord.of(group)  # can raise, so serialize before counting the group
        self._account.add_group(len(nest))
        return group, record

    def _keep(self, groups: Sequence[tuple[GroupOrRecord, GroupRecord]]) -> None:
        self._queue.extend(record for _, record in groups)

    def mark_trained(self, group_indices: Iterable[int]) -> None:
        """Settles groups as trained. Raises `LedgerError` if one is not in flight, for example if trained twice."""
        with self._lock:
            self._account.num_trained += self._account.settle(group_indices, "trained")

    def mark_filtered(self, group_indices: Iterable[int], reason: str) -> None:
        """Settles groups that were dropped on purpose. Raises `LedgerError` if one is not in flight."""
        with self._lock:
            self._account.filtered[reason] += self._account.settle(group_indices, "filtered")

    def mark_failed(self, group_indices: Iterable[int], reason: str) -> None:
        """Settles failed groups. Raises `LedgerError` if one is not in flight."""
        with self._lock:
            self._account.failed[reason] += self._account.settle(group_indices, "failed")

    def _is_buffered(self, group_index: int) -> bool:
        return any(group.group_index == group_index for group in self._queue + self._finished)

    # ---- bookkeeping ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Returns the number of usable rows of the dataset; 0 without a dataset."""
        return 0 if self._walk is None else len(self._walk.prompts)

    @property
    def prompts(self) -> Prompts | None:
        """The dataset; None without one."""
        return None if self._walk is None else self._walk.prompts

    def row_source(self, group_index: int) -> str | None:
        """Returns the file and line of an unsettled group's row; None if it has no row."""
        row, prompts = self._row_of(group_index), self.prompts
        return None if row is None or prompts is None else without_ids(prompts, row).source

    def note_rewards(self, group_index: int, rewards: Sequence[float]) -> None:
        """Tells the sampler the rewards of an unsettled group's executions. Does nothing for a group without a row."""
        with self._lock:
            row = self._row_of(group_index)
            if self._walk is not None and row is not None:
                self._walk.note(row, rewards)

    def task(self, group_index: int) -> str | None:
        """Returns the task of an unsettled group's row; None if it has none."""
        row, prompts = self._row_of(group_index), self.prompts
        return None if row is None or prompts is None else task_of(without_ids(prompts, row), self._task_key)

    def _row_of(self, group_index: int) -> int | None:
        """Returns the row of an unsettled group; None if it has no row."""
        with self._lock:
            origin = self._account.origins.get(group_index)
        return None if origin is None else origin.row

    @property
    def epoch(self) -> int:
        """Number of completed passes over the dataset, counting issued prompts."""
        return 0 if self._walk is None else self._walk.epoch

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Indices of the groups in flight, in the order in which they were issued."""
        with self._lock:
            return tuple(self._account.in_flight)

    @property
    def num_buffered(self) -> int:
        """Number of groups waiting to be issued again, including finished ones."""
        return len(self._queue) + len(self._finished)

    @property
    def num_finished(self) -> int:
        """Number of finished groups waiting to be trained."""
        return len(self._finished)

    def ledger(self) -> Ledger:
        with self._lock:
            return self._account.ledger(num_buffered=self.num_buffered)

    def metrics(self) -> dict[str, float]:
        own = getattr(self._walk.prompts, "metrics", dict) if self._walk else dict
        figures = {"data/epoch": float(self.epoch), "data/finished": float(self.num_finished)}
        walk = {} if self._walk is None else self._walk.metrics()
        return {**self.ledger().metrics(), **figures, **own(), **walk}

    # ---- saving --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns a JSON-serializable deep copy of the state. Raises `LedgerError` if the ledger does not balance."""
        return self._snapshot().plain()

    def _snapshot(self) -> Snapshot:
        """Takes a snapshot of the state. Raises `LedgerError` if the ledger does not balance."""
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
            logger.info("reissuing the %d groups that were in flight when the buffer was saved", len(again))

    def begin_save(self, path: Path, *, rollout_id: int | None = None) -> Callable[[], None]:
        """Takes a snapshot. Returns a function that writes it to `path` and files next to it, from any thread."""
        snapshot = self._snapshot()
        return lambda: snapshot.write(path)

    def load(self, path: Path, *, rollout_id: int | None = None) -> None:
        """Restores a saved state. Raises `CheckpointError` if it is missing or damaged, or the dataset differs."""
        try:
            self._load(SavedState.of(read_checkpoint_json(path), path))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the buffer state in {path} is damaged: {type(error).__name__}: {error}") from error
