"""Laws of what the Data Buffer's checkpoint holds of a group: what it had when it was noted, and no giant text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from slime.buffer import snapshot
from slime.buffer.data_buffer import DataBuffer
from slime.buffer.groups import MAX_SAVED_TEXT, GroupRecord, note_quarantines, num_quarantines
from slime.core.errors import CheckpointError, DataError, LedgerError
from slime.core.routed_experts import RoutedExperts
from slime.core.sample import Fingerprint, Group, PromptRow, Sample, Status


class Rows:
    """Three prompts."""

    fingerprint = Fingerprint(source="rows", num_rows=3, digest="d")

    def __len__(self) -> int:
        return 3

    def __getitem__(self, row: int) -> PromptRow:
        return PromptRow(f"p{row}", (row + 1, 7), label=row, metadata={}, source="")


def make() -> DataBuffer:
    return DataBuffer(Rows(), n_samples_per_prompt=3)


def resume(buffer: DataBuffer) -> DataBuffer:
    resumed = make()
    resumed.load_state_dict(buffer.state_dict())
    return resumed


def extend(group: Group, version: int) -> None:
    """Partial work, in place, as a generate function does it."""
    for sample in group.samples:
        sample.append_response_tokens([5, 6], log_probs=[-0.1, -1 / 3], weight_version=version, text="ab")
        sample.status = Status.ABORTED


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(st.lists(st.floats(), max_size=4), st.dictionaries(st.text(), JSON, max_size=3), JSON)
def test_the_text_of_a_group_reads_back_as_it_was(log_probs: list[float], metadata: dict[str, Any], label: Any) -> None:
    """Bit for bit, not-a-number and infinity included."""
    sample = Sample(group_index=3, index=7, tokens=[2, 151_000], label=label, metadata=metadata, reward=float("nan"))
    sample.append_response_tokens(range(len(log_probs)), log_probs=log_probs, weight_version=2, text="\u00e9\ud800")
    group = Group(3, (sample, Sample(group_index=3)), attempts=2)
    again = Group.from_dict(json.loads(group.to_json()))
    assert repr(again) == repr(group)
    with pytest.raises(ValueError, match="not JSON compliant"):
        group.to_json(allow_nan=False)


@pytest.mark.parametrize("kind", [np.float64, np.float32])
def test_numbers_of_numpy_are_written_as_numbers(kind: type) -> None:
    sample = Sample(group_index=3, tokens=[2], metadata={})
    sample.append_response_tokens(np.asarray([5, 6], np.uint8), log_probs=[kind(-0.5), kind(-2.25)], weight_version=1)
    (again,) = Group.from_dict(json.loads(Group(3, (sample,)).to_json())).samples
    assert again.tokens == [2, 5, 6] and again.rollout_log_probs == [-0.5, -2.25] and again.token_versions == [1, 1]


@pytest.mark.parametrize("values", [np.asarray([5, 6]), np.asarray([5]), torch.ones(2), [5, object()], [{5}], {5, 6}])
def test_what_is_no_list_of_numbers_is_refused_by_its_group(values: Any) -> None:
    with pytest.raises(DataError, match=r"group 3 .* not JSON serializable.* fields of samples"):
        GroupRecord.of(Group(3, (Sample(group_index=3, teacher_log_probs=values),)))


@pytest.mark.parametrize("values", [[], [None, -0.5], [2**70, 10**400], [True, -0.0, 5e-324], (1, 2)])
def test_what_json_can_say_is_kept(values: Any) -> None:
    group = Group(3, (Sample(group_index=3, teacher_log_probs=values),))
    (again,) = GroupRecord.of(group).group().samples
    assert repr(again.teacher_log_probs) == repr(list(values))


def test_quarantines_are_still_known_when_a_group_starts_over() -> None:
    buffer = make()
    (group,) = buffer.get_groups(1)
    extend(note_quarantines(group, 2), 1)
    buffer.put_back([group], "quarantined")
    resumed = resume(buffer)
    resumed.max_staleness, resumed.weight_version = 0, 2
    (fresh,) = resumed.get_groups(1)
    assert fresh.samples[0].response_length == 0 and num_quarantines(fresh) == 2
    assert resumed.ledger().returned["stale"] == 1


def test_a_group_in_flight_is_saved_as_it_was_noted() -> None:
    buffer = make()
    (group,) = buffer.get_groups(1)
    extend(group, 1)
    buffer.note(group)
    noted = json.loads(json.dumps(group.to_dict()))
    extend(group, 2)
    resumed = resume(buffer)
    assert resumed.get_groups(1)[0].to_dict() == noted
    buffer.mark_trained([group.group_index])
    with pytest.raises(LedgerError, match="noted"):
        buffer.note(group)


def test_a_giant_text_does_not_fill_checkpoints() -> None:
    """What nobody grades any more keeps all but the end of its text; the rest starts over rather than be graded so."""
    buffer = make()
    finished, waiting = buffer.get_groups(2)
    for group in (finished, waiting):
        extend(group, 1)
        for sample in group.samples[:2]:
            sample.response, sample.status = "x" * (MAX_SAVED_TEXT + 9), Status.COMPLETED
        group.samples[0].reward = 1.0
    buffer.put_back([waiting], "unscored")
    buffer.put_finished(finished)
    resumed = resume(buffer)
    ((first, second, third),) = (record.group().samples for record in resumed.take_finished(1))
    assert first.response == second.response == "x" * MAX_SAVED_TEXT
    assert first.tokens == finished.samples[0].tokens and (first.reward, second.reward) == (1.0, None)
    assert third == finished.samples[2]
    (again,) = resumed.get_groups(1)
    assert [s.response_length for s in again.samples] == [2, 0, 2] and again.samples[1].status is Status.PENDING
    assert len(buffer.get_groups(1)[0].samples[0].response) == MAX_SAVED_TEXT + 9, "the run itself goes on with all"


def test_what_waits_is_saved_as_it_came() -> None:
    """It is written once, when it comes: a save converts no token, and nothing that happens later can make it fail."""
    buffer = make()
    finished, waiting, out = buffer.get_groups(3)
    buffer.put_finished(finished)
    buffer.put_back([waiting], "aborted")
    came = buffer.state_dict()
    for group in (finished, waiting, out):
        group.samples[0].metadata["late"] = object()
    assert buffer.state_dict() == came
    buffer.take_finished(1)
    assert [g["group"] and g["group"]["group_index"] for g in buffer.state_dict()["in_flight"]] == [None, 0]


def long_work(group: Group, version: int, length: int = 2000) -> None:
    """Finished answers whose numbers are worth arrays, with routed experts."""
    for sample in group.samples:
        sample.append_response_tokens(
            [(sample.index or 0) + 3 * i for i in range(length)],
            log_probs=[-i / 7 if i == 5 else -i / 8 for i in range(length)],
            weight_version=version,
            text=f"answer {sample.index} \u00e9" * length,
            finish_reason="stop",
        )
        sample.append_response_tokens([1] * length)
        sample.status, sample.reward, sample.metadata = Status.COMPLETED, 0.5, {"turns": [{"a": 1}]}
        rows = np.arange(length * 4, dtype=np.int64).reshape(length, 2, 2) % 200
        sample.rollout_routed_experts = RoutedExperts(rows.astype(np.uint8))


def saved(buffer: DataBuffer, path: Path) -> list[str]:
    """Names of the files of a save."""
    buffer.begin_save(path)()
    return sorted(one.name for one in path.parent.iterdir())


def busy() -> tuple[DataBuffer, dict[str, Any]]:
    """A buffer with long work in every place, and its state."""
    buffer = make()
    finished, waiting, noted = buffer.get_groups(3)
    for group in (finished, waiting, noted):
        long_work(group, 1 + group.group_index)
    buffer.put_finished(finished)
    buffer.put_back([waiting], "surplus")
    buffer.note(noted)
    return buffer, buffer.state_dict()


def test_a_save_is_a_small_ledger_and_arrays_that_read_back_exactly(tmp_path: Path) -> None:
    """Law: groups are read when they are wanted, also after their checkpoint was pruned."""
    buffer, state = busy()
    path = tmp_path / "b.json"
    names = saved(buffer, path)
    assert names[1:] == ["b.json"] and names[0].endswith(".1.safetensors")
    assert path.stat().st_size < 2000 and b"answer" not in path.read_bytes()
    num_numbers = 9 * 4000
    size = sum(one.stat().st_size for one in tmp_path.iterdir())
    assert size < num_numbers * (2 + 8 + 4 + 0.2) + 20_000, (
        "2 for a token, 8 for a log-prob that needs it, 4 of experts"
    )
    resumed = make()
    resumed.load(path)
    for one in tmp_path.iterdir():
        one.unlink()
    assert resumed.state_dict() == {**state, "buffered": [], "in_flight": []} | {
        "buffered": [state["in_flight"][0]["group"], *state["buffered"]],
    }
    assert [group.to_dict() for group in (r.group() for r in resumed.take_finished(1))] == state["finished"]
    assert resumed.get_groups(1)[0].to_dict() == state["in_flight"][0]["group"]
    saved(resumed, path)
    again = make()
    again.load(path)
    assert again.state_dict()["finished"] == [] and again.num_buffered == 3


def test_a_later_save_takes_the_place_of_an_earlier_one_and_of_no_other(tmp_path: Path) -> None:
    buffer, _ = busy()
    other, first = saved(buffer, tmp_path / "other.json"), saved(buffer, tmp_path / "b.json")
    names = saved(buffer, tmp_path / "b.json")
    assert len(names) == 4 and set(other) < set(names) and len(set(first) & set(names)) == 3


def test_the_groups_of_a_large_save_are_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MOST_BYTES", 100_000)
    buffer, state = busy()
    assert len(saved(buffer, tmp_path / "b.json")) == 4
    resumed = make()
    resumed.load(tmp_path / "b.json")
    assert resumed.state_dict()["finished"] == state["finished"]


@pytest.mark.parametrize("damage", ["missing", "cut short", "another save's"])
def test_a_damaged_file_of_records_is_named_before_anything_is_issued(tmp_path: Path, damage: str) -> None:
    buffer, _ = busy()
    (name, _) = saved(buffer, tmp_path / "b.json")
    file = tmp_path / name
    if damage == "missing":
        file.unlink()
    elif damage == "cut short":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        save_file({"7": np.zeros(1)}, file)
    with pytest.raises(CheckpointError, match=name):
        make().load(tmp_path / "b.json")


def test_a_state_of_before_is_still_read(tmp_path: Path) -> None:
    """Format 1 had all groups in its JSON."""
    buffer, state = busy()
    path = tmp_path / "b.json"
    path.write_text(json.dumps(state))
    assert state["format"] == 1
    resumed = make()
    resumed.load(path)
    assert resumed.state_dict()["finished"] == state["finished"] and resumed.num_buffered == buffer.num_buffered + 1


def test_a_group_is_as_old_as_its_oldest_token_and_counts_how_often_it_was_issued() -> None:
    """Law: whichever sample has that token: it says who goes first, and who starts over; that is one issue more."""
    buffer = make()
    first = buffer.get_groups(4)
    buffer.put_back(first[2:3], "aborted")
    again = buffer.get_groups(1)
    of_tokens = {1: (3, 3, 1), 2: (3, 2, 3)}
    for group in (*first[:2], *again, first[3]):
        for place, sample in enumerate(group.samples):
            version = of_tokens.get(group.group_index, (3, 3, 3))[place]
            sample.append_response_tokens([5, 6, 7], log_probs=[-0.1] * 3, weight_version=[3, version, 3])
        buffer.put_finished(group)
    buffer.max_staleness, buffer.weight_version = 1, 3
    assert buffer.take_finished(4) == [] and buffer.num_finished == 3
    assert buffer.ledger().returned == {"aborted": 1, "stale": 1}
    taken = buffer.take_finished(3)
    assert [(one.group_index, one.attempts) for one in taken] == [(2, 1), (0, 0), (3, 0)]
    (stale,) = buffer.get_groups(1)
    assert (stale.group_index, stale.attempts, stale.samples[0].response_length) == (1, 1, 0)
    extend(stale, 3)
    buffer.put_back([stale, taken[0]], "aborted")
    buffer.weight_version = 5
    assert [(group.group_index, group.attempts) for group in buffer.get_groups(2)] == [(1, 2), (2, 2)]
    assert buffer.ledger().returned == {"aborted": 3, "stale": 3}


def test_what_a_filter_writes_into_a_group_it_leaves_is_issued_and_saved(tmp_path: Path) -> None:
    """Law: a filter sees each group once as what it was, and later as what it left."""
    seen: list[Any] = []

    def leave_all_but_one(queue: list[list[Sample]], n: int) -> list[list[Sample]]:
        for samples in queue:
            seen.append(samples[0].metadata.setdefault("seen", 0))
            samples[0].metadata["seen"] += 1
        return [queue.pop(0)]

    buffer = DataBuffer(Rows(), n_samples_per_prompt=1, buffer_filter=leave_all_but_one)
    groups = buffer.get_groups(3)
    buffer.put_back(groups, "surplus")
    assert buffer.get_groups(1)[0].samples[0].metadata == {"seen": 1}
    saved(buffer, tmp_path / "b.json")
    resumed = DataBuffer(Rows(), n_samples_per_prompt=1)
    resumed.load(tmp_path / "b.json")
    assert [g["samples"][0]["metadata"]["seen"] for g in resumed.state_dict()["buffered"]] == [1, 1, 1]
    assert buffer.get_groups(1)[0].samples[0].metadata == {"seen": 2} and seen == [0, 0, 0, 1, 1]
    buffer.put_back([groups[0]], "surplus")
    assert buffer.ledger().buffered == 2
    buffer.ledger().check()
