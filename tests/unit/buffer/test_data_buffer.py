"""Laws of the Data Buffer: nothing is lost, nothing is settled twice, and a resume equals not stopping."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slime.buffer.data_buffer import DataBuffer
from slime.core.errors import CheckpointError, DataError, LedgerError
from slime.core.sample import Fingerprint, Group, PromptRow, Sample, Status


class Rows:
    """A dataset in memory."""

    def __init__(self, num_rows: int, digest: str = "d") -> None:
        self.num_rows = num_rows
        self.fingerprint = Fingerprint(source=f"{num_rows} rows", num_rows=num_rows, digest=digest)

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> PromptRow:
        return PromptRow(f"p{row}", (row + 1, 7), label=row, metadata={"row": row, "deep": [row]}, source=f"m:{row}")


def make(num_rows: int = 5, **options) -> DataBuffer:
    return DataBuffer(Rows(num_rows), **{"n_samples_per_prompt": 2, "shuffle": True, "seed": 3, **options})


def row_of(group: Group) -> int:
    return group.samples[0].metadata["row"]


def extend(group: Group, version: int) -> None:
    """Partial work, in place, as a generate function does it."""
    for sample in group.samples:
        sample.append_response_tokens([5, 6], log_probs=[-0.1, -1 / 3], weight_version=version, text="ab")
        sample.status = Status.ABORTED
        sample.metadata["deep"].append(version)


def test_a_group_started_over_is_as_first_issued() -> None:
    buffer = make()
    (group,) = buffer.get_groups(1)
    first = group.to_dict()
    first = json.loads(json.dumps(first))
    extend(group, 1)
    buffer.put_back([group], "surplus")
    (again,) = buffer.get_groups(1)
    fresh = buffer.start_over(again)
    assert fresh.to_dict() == {**first, "attempts": 1}
    resumed = make()
    resumed.load_state_dict(buffer.state_dict())
    assert resumed.get_groups(1)[0].to_dict() == fresh.to_dict()
    buffer.mark_trained([fresh.group_index])
    with pytest.raises(LedgerError, match="started over"):
        buffer.start_over(fresh)


def test_a_group_made_outside_loses_its_responses_only() -> None:
    buffer = DataBuffer(None)
    buffer.add_samples([[Sample(prompt="mine", tokens=[1, 2], metadata={"x": 1}) for _ in range(2)]])
    (group,) = buffer.get_groups(1)
    for sample in group.samples:
        sample.append_response_tokens([5], log_probs=[-0.1], weight_version=0, text="a", finish_reason="stop")
        sample.reward = 1.0
    fresh = buffer.start_over(group)
    assert [(s.prompt, s.tokens, s.metadata, s.reward) for s in fresh.samples] == [("mine", [1, 2], {"x": 1}, None)] * 2
    assert all(s.status is Status.PENDING and s.token_versions is None for s in fresh.samples)


def test_new_groups_have_fresh_ids_and_own_their_containers() -> None:
    buffer = make(3)
    groups = buffer.get_groups(4)
    assert [g.group_index for g in groups] == [0, 1, 2, 3]
    assert [s.index for g in groups for s in g.samples] == list(range(8))
    assert sorted(map(row_of, groups[:3])) == [0, 1, 2] and buffer.epoch == 1
    first, second = groups[0].samples
    first.tokens.append(9)
    first.metadata["deep"].append(9)
    assert second.tokens == [row_of(groups[0]) + 1, 7] and second.metadata["deep"] == [row_of(groups[0])]
    assert second.label == row_of(groups[0])


@given(st.integers(1, 12), st.integers(0, 99), st.booleans())
def test_an_epoch_visits_each_row_once(num_rows: int, seed: int, shuffle: bool) -> None:
    buffer = DataBuffer(Rows(num_rows), shuffle=shuffle, seed=seed)
    epochs = [[row_of(g) for g in buffer.get_groups(num_rows)] for _ in range(3)]
    assert all(sorted(e) == list(range(num_rows)) for e in epochs)
    if not shuffle:
        assert epochs[0] == sorted(epochs[0])


def test_the_order_of_an_epoch_depends_on_seed_and_epoch_alone() -> None:
    one, two = make(50), make(50)
    one.get_groups(50)
    two.get_groups(13)
    two.get_groups(37)
    assert [row_of(g) for g in one.get_groups(50)] == [row_of(g) for g in two.get_groups(50)]


def test_every_epoch_has_an_order_of_its_own() -> None:
    """Law: shuffled prompts come in another order each time round, and not in the order of the file."""
    buffer = make(50)
    orders = [tuple(row_of(g) for g in buffer.get_groups(50)) for _ in range(4)]
    assert len({*orders, tuple(range(50))}) == 5, "an epoch repeats the order of another, or of the file"


def test_returned_groups_come_first_in_order_with_their_work() -> None:
    buffer = make()
    a, b, c = buffer.get_groups(3)
    extend(a, 4)
    buffer.put_back([b], "aborted")
    buffer.put_back([a], "aborted")
    buffer.mark_trained([c.group_index])
    first, second, third = buffer.get_groups(3)
    assert (first.group_index, second.group_index, third.group_index) == (1, 0, 3)
    assert first.attempts == second.attempts == 1 and third.attempts == 0
    assert second.samples[0].token_versions == [4, 4] and second.samples[0].rollout_log_probs == [-0.1, -1 / 3]
    assert buffer.ledger().returned == {"aborted": 2}


def test_a_group_that_starts_over_has_no_work_left() -> None:
    buffer = make()
    (group,) = buffer.get_groups(1)
    prompt = list(group.samples[0].tokens)
    extend(group, 4)
    buffer.put_back([buffer.start_over(group)], "aborted")
    (again,) = buffer.get_groups(1)
    assert again.group_index == group.group_index and again.attempts == 1
    assert [s.index for s in again.samples] == [s.index for s in group.samples]
    assert again.samples[0].tokens == prompt and again.samples[0].response_length == 0
    assert again.samples[0].status is Status.PENDING and again.samples[0].metadata["deep"] == [row_of(again)]


@pytest.mark.parametrize("verb", ["mark_trained", "mark_filtered", "mark_failed"])
def test_a_group_is_settled_once(verb: str) -> None:
    buffer = make()
    a, b = buffer.get_groups(2)
    buffer.mark_trained([a.group_index])
    reason = () if verb == "mark_trained" else ("why",)
    for indices in ([a.group_index], [b.group_index, b.group_index], [99], [b.group_index, a.group_index]):
        with pytest.raises(LedgerError):
            getattr(buffer, verb)(indices, *reason)
    with pytest.raises(LedgerError, match="already settled"):
        buffer.put_back([a], "again")
    buffer.put_back([b], "later")
    with pytest.raises(LedgerError, match="buffered"):
        getattr(buffer, verb)([b.group_index], *reason)
    buffer.ledger().check()
    assert buffer.ledger().trained == 1


def test_the_ledger_notices_a_loss() -> None:
    buffer = make()
    buffer.get_groups(2)
    del buffer._account.in_flight[0]
    with pytest.raises(LedgerError, match="accounted"):
        buffer.ledger().check()
    with pytest.raises(LedgerError):
        buffer.state_dict()


def test_public_names_work_with_fan_out_and_new_work() -> None:
    buffer = make()
    (samples,) = buffer.get_samples(1)
    sibling = Sample.from_dict(samples[1].to_dict())
    buffer.add_samples([[samples[0], [samples[1], sibling]]])
    buffer.add_samples([[Sample(prompt="own"), Sample(prompt="own")]])
    old, new = buffer.get_samples(2)
    assert [s.index for s in old] == [0, 1, 1]
    assert [(s.group_index, s.index, s.prompt) for s in new] == [(1, 2, "own"), (1, 3, "own")]
    assert buffer.ledger().issued == 2
    buffer.ledger().check()


def test_what_cannot_be_saved_is_refused_when_it_comes() -> None:
    buffer = make()
    (group,) = buffer.get_groups(1)
    group.samples[0].metadata["tensor"] = object()
    with pytest.raises(DataError, match="JSON"):
        buffer.put_back([group], "aborted")
    assert buffer.in_flight == (0,)


def test_a_buffer_filter_chooses_leaves_and_drops() -> None:
    def newest_first(buffer: list[list[Sample]], n: int) -> list[list[Sample]]:
        buffer.pop(0)
        buffer[0][0].metadata["seen"] = True
        return [buffer.pop() for _ in range(min(n, len(buffer)))]

    buffer = make(buffer_filter=newest_first)
    buffer.put_back(buffer.get_groups(4), "aborted")
    assert [g.group_index for g in buffer.get_groups(2)] == [3, 2]
    assert buffer.ledger().filtered == {"buffer_filter": 1} and buffer.num_buffered == 1
    assert buffer.state_dict()["buffered"][0]["samples"][0]["metadata"]["seen"], "what it noted is not saved"
    buffer.ledger().check()
    greedy = make(buffer_filter=lambda queue, n: list(queue))
    greedy.put_back(greedy.get_groups(2), "aborted")
    with pytest.raises(LedgerError, match="buffer-filter-path"):
        greedy.get_groups(2)


def test_no_dataset_gives_blank_samples() -> None:
    buffer = DataBuffer(None, n_samples_per_prompt=2)
    (group,) = buffer.get_groups(1)
    assert [s.prompt for s in group.samples] == ["", ""] and len(buffer) == 0
    other = DataBuffer(None)
    other.load_state_dict(buffer.state_dict())
    assert other.get_groups(1)[0].num_executions == 2


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (lambda: DataBuffer(Rows(6), shuffle=True, seed=3), "rows"),
        (lambda: DataBuffer(Rows(5, "x"), shuffle=True, seed=3), "skip or repeat"),
        (lambda: DataBuffer(Rows(5), shuffle=True, seed=4), "seed=4"),
        (lambda: DataBuffer(Rows(5), shuffle=False, seed=3), "shuffle=False"),
        (lambda: DataBuffer(None), "the saved run has a dataset, but this one has none"),
    ],
)
def test_a_state_of_other_data_is_refused(other, match: str) -> None:
    buffer = make()
    buffer.get_groups(3)
    with pytest.raises(CheckpointError, match=match):
        other().load_state_dict(buffer.state_dict())


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "buffer.json"
    buffer = make()
    buffer.get_groups(1)
    buffer.begin_save(path)()
    assert sorted(p.name for p in path.parent.iterdir()) == ["buffer.json"]
    text = path.read_text()
    cut = tmp_path / "cut.json"
    broken = {**json.loads(text), "origins": []}
    for damaged in (text[: len(text) // 2], "[]", json.dumps({**json.loads(text), "format": 0}), json.dumps(broken)):
        cut.write_text(damaged)
        with pytest.raises(CheckpointError):
            make().load(cut)
    with pytest.raises(CheckpointError, match="missing"):
        make().load(tmp_path / "missing.json")
    with pytest.raises(CheckpointError, match="files next to its JSON"):
        make().load_state_dict(json.loads(text))
    state = buffer.state_dict()
    state["trained"] += 1
    with pytest.raises(LedgerError):
        make().load_state_dict(state)


class BufferMachine(RuleBasedStateMachine):
    """Any run of the buffer, with a save, a crash and a load at any moment, against a plain model of it."""

    @initialize(num_rows=st.integers(1, 6), shuffle=st.booleans(), seed=st.integers(0, 5))
    def start(self, num_rows: int, shuffle: bool, seed: int) -> None:
        self.options = {"num_rows": num_rows, "shuffle": shuffle, "seed": seed}
        self.buffer = make(**self.options)
        self.out: dict[int, Group] = {}
        self.queue: list[tuple[int, dict]] = []
        self.as_issued: dict[int, dict] = {}
        self.settled: set[int] = set()
        self.rows: Counter[int] = Counter()
        self.num_seen = 0

    @rule(n=st.integers(0, 5))
    def take(self, n: int) -> None:
        groups = self.buffer.get_groups(n)
        assert len(groups) == n
        for group in groups:
            if self.queue:
                index, expected = self.queue.pop(0)
                assert (group.group_index, group.to_dict()) == (index, expected)
            else:
                assert group.group_index == self.num_seen, "an id was skipped or used twice"
                self.num_seen += 1
                self.rows[row_of(group)] += 1
            self.out[group.group_index] = group
            self.as_issued[group.group_index] = json.loads(json.dumps(group.to_dict()))
        assert max(self.rows.values(), default=0) - min(self.rows[r] for r in range(self.options["num_rows"])) <= 1

    def pick(self, data: st.DataObject) -> list[Group]:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.out)), unique=True))
        return [self.out[i] for i in chosen]

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def generate(self, data: st.DataObject) -> None:
        for group in self.pick(data):
            extend(group, len(self.settled))

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def back(self, data: st.DataObject) -> None:
        groups = self.pick(data)
        self.buffer.put_back(groups, "aborted")
        for group in groups:
            del self.out[group.group_index]
            again = {**group.to_dict(), "attempts": group.attempts + 1}
            self.queue.append((group.group_index, json.loads(json.dumps(again))))

    @precondition(lambda self: self.out)
    @rule(data=st.data(), how=st.sampled_from(["trained", "filtered", "failed"]))
    def settle(self, data: st.DataObject, how: str) -> None:
        indices = [g.group_index for g in self.pick(data)]
        getattr(self.buffer, f"mark_{how}")(indices, *([] if how == "trained" else ["why"]))
        assert not self.settled & set(indices)
        self.settled |= set(indices)
        for index in indices:
            del self.out[index]
        for index in sorted(self.settled)[:1]:
            with pytest.raises(LedgerError):
                self.buffer.mark_trained([index])

    @rule(by_file=st.booleans())
    def crash_and_resume(self, by_file: bool) -> None:
        before, self.buffer = self.buffer, make(**self.options)
        if by_file:
            with tempfile.TemporaryDirectory() as folder:
                before.begin_save(Path(folder) / "b.json")()
                self.buffer.load(Path(folder) / "b.json")  # and then the folder is gone
        else:
            self.buffer.load_state_dict(json.loads(json.dumps(before.state_dict())))
        self.queue = [(i, self.as_issued[i]) for i in self.out] + self.queue
        self.out = {}

    @rule()
    def save_without_stopping(self) -> None:
        assert self.buffer.state_dict() == self.buffer.state_dict()

    @invariant()
    def balance(self) -> None:
        if not hasattr(self, "buffer"):
            return
        ledger = self.buffer.ledger()
        ledger.check()
        settled = ledger.trained + sum(ledger.filtered.values()) + sum(ledger.failed.values())
        assert (ledger.issued, ledger.in_flight, ledger.buffered) == (self.num_seen, len(self.out), len(self.queue))
        assert settled == len(self.settled)


BufferMachine.TestCase.settings = settings(stateful_step_count=40, deadline=None)
TestBufferMachine = BufferMachine.TestCase


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.integers(0, 7))
@settings(deadline=None)
def test_stopping_between_steps_changes_nothing(steps: list[int], stop_after: int) -> None:
    def run(stop: bool) -> list[list[dict]]:
        buffer, seen = make(), []
        for step, n in enumerate(steps):
            groups = buffer.get_groups(n + 1)
            extend(groups[-1], step)
            buffer.put_back(groups[-1:], "surplus")
            buffer.mark_trained([g.group_index for g in groups[:-1]])
            seen.append([g.to_dict() for g in groups])
            if stop and step == stop_after:
                state = json.dumps(buffer.state_dict())
                buffer = make()
                buffer.load_state_dict(json.loads(state))
                assert json.dumps(buffer.state_dict()) == state
        return seen

    assert run(stop=True) == run(stop=False)
