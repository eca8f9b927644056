"""Routed experts stay with their tokens: on the wire, in a sample, in a checkpoint, in parts, in a train batch."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.buffer.groups import reset
from slime.core.batch import TrainSample
from slime.core.errors import DataError
from slime.core.routed_experts import ExpertFormat, RoutedExperts, digests_of, join, not_recorded
from slime.core.sample import Group, Sample

FORMAT = ExpertFormat(num_experts=8, topk=2, sparse=(False, True, True))


def wire(rows: Any) -> str:
    return base64.b64encode(np.asarray(rows, "<i4").tobytes()).decode()


def chosen(num_rows: int, num_experts: int = 8, topk: int = 2, seed: int = 0) -> Any:
    """[rows, 3, topk] different experts; of the first layer, which is dense, zeros."""
    ids = np.random.default_rng(seed).random((num_rows, 3, num_experts)).argsort(-1)[..., :topk]
    ids[:, 0] = 0
    return ids


def of_tokens(tokens: list[int], start: int = 0) -> RoutedExperts:
    """Rows that say which token they are of."""
    return RoutedExperts(np.tile(np.asarray(tokens, np.uint8)[:, None, None], (1, 3, 2)), start)


@given(
    num_rows=st.integers(0, 7),
    start=st.integers(0, 5),
    num_experts=st.sampled_from([2, 8, 254, 255, 256, 512]),
    topk=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_what_an_engine_sends_comes_back_from_json(
    num_rows: int, start: int, num_experts: int, topk: int, seed: int
) -> None:
    rows = chosen(num_rows, num_experts, topk, seed)
    form = ExpertFormat(num_experts, topk, sparse=(False, True, True))
    decoded = form.decode(wire(rows), start=start, num_rows=num_rows)
    assert np.array_equal(decoded.ids, rows) and decoded.end == start + num_rows and decoded.recorded.all()
    assert decoded.ids.itemsize == (1 if num_experts < 255 else 2)
    again = RoutedExperts.from_dict(json.loads(json.dumps(decoded.to_dict())))
    assert again == decoded and again.ids.dtype == decoded.ids.dtype


@pytest.mark.parametrize(
    ("text", "num_rows", "message"),
    [
        ("!", 1, "not base64"),
        ("AAA=", 1, "not base64"),
        (wire(chosen(2)), 3, "must serve the same model"),
        (wire(chosen(2) + 8), 2, "has 8 experts"),
        (wire(chosen(2) - 1), 2, "has 8 experts"),
        (wire(np.zeros((2, 3, 2))), 2, "twice for token 4 in layer 1"),
    ],
)
def test_what_does_not_fit_is_refused(text: str, num_rows: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        FORMAT.decode(text, start=4, num_rows=num_rows)


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.integers(0, 30)), min_size=1, max_size=6))
def test_a_row_stays_with_its_token(parts: list[tuple[int, bool, int]]) -> None:
    """Turns with and without a record, read from any token on: each recorded row names the token that it is of."""
    sample, next_id = Sample(tokens=[1, 2, 3], index=0, group_index=0), 4
    for num, has_record, start in parts:
        new = list(range(next_id, next_id + num))
        next_id += num
        tokens = sample.tokens + new
        start = min(start, len(tokens) - 1)
        record = of_tokens(tokens[start:-1], start) if has_record else None
        sample.append_response_tokens(new, log_probs=[-1.0] * num, weight_version=1, routed_experts=record)
    known = sample.rollout_routed_experts
    if known is None:
        assert not any(has_record for _, has_record, _ in parts)
        return
    rows = known.ids[:, 1, 0]
    assert known.start == 0 and all(rows[known.recorded] == np.asarray(sample.tokens[: known.end])[known.recorded])
    again = Sample.from_dict(json.loads(sample.to_json()))
    assert again == sample and sample.copy() == sample
    frozen = TrainSample.from_sample(sample, reward=1.0)
    assert frozen.routed_experts is not None and np.array_equal(frozen.routed_experts, known.ids)


def test_a_row_that_is_there_is_kept() -> None:
    """It belongs to the token that was sampled from it, under that version; later reads are of other weights."""
    first, later = RoutedExperts(np.full((3, 3, 2), 1, np.uint8)), RoutedExperts(np.full((5, 3, 2), 2, np.uint8))
    joined = join(first, later, 6)
    assert joined is not None and joined.ids[:, 0, 0].tolist() == [1, 1, 1, 2, 2]
    behind = join(first, RoutedExperts(later.ids[:1], start=4), 6)
    assert behind is not None and behind.ids[:, 0, 0].tolist() == [1, 1, 1, not_recorded(np.uint8), 2]
    assert behind.recorded.tolist() == [True, True, True, False, True]


@pytest.mark.parametrize(
    ("versions", "read", "wanted"),
    [
        ([1, 1, -1, 1], (6, 1), [0, 1, 2, 3, 4, 5, 6]),  # read again by the same weights
        ([1, 1, -1, 1], (6, 2), [0, 3, 5, 6]),  # tokens 2, 3 and 5 have their log-probs by other experts
        ([1, 2, -1, 2], (6, 2), [0, 2, 3, 4, 5, 6]),
        ([1, 1, -1, 1], (3, 2), [0, 2, 3, 4, 5, 6]),  # what a stream has brought behind its prompt is its own
        ([1, 1, -1, 1], None, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_a_row_that_other_weights_have_read_is_left_out(versions: list[int], read: Any, wanted: list[int]) -> None:
    """Tokens 2 to 5 were there, with the versions that sampled them; a request reads all, and samples two more."""
    sample = Sample(tokens=list(range(6)), response_length=4, loss_mask=[1, 1, 0, 1], token_versions=versions)
    sample.rollout_log_probs = [-1.0] * 4
    record = RoutedExperts(of_tokens(list(range(7))).ids, read=read)
    sample.append_response_tokens([6, 7], log_probs=[-1.0] * 2, weight_version=2, routed_experts=record)
    known = sample.rollout_routed_experts
    assert known is not None and known.read is None and np.flatnonzero(known.recorded).tolist() == wanted
    assert known.ids[known.recorded, 1, 0].tolist() == wanted and record.recorded.all()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (of_tokens([1, 2, 3, 4]), "the last token has not been routed"),
        (RoutedExperts(np.zeros((2, 4, 2), np.uint8)), "the same model"),
        (RoutedExperts(np.zeros((2, 3, 2), np.int16)), "the same model"),
    ],
)
def test_a_record_that_cannot_be_of_the_sample_is_refused(record: RoutedExperts, message: str) -> None:
    sample = Sample(tokens=[1, 2], index=0, group_index=0, rollout_routed_experts=of_tokens([1]))
    with pytest.raises(DataError, match=message):
        sample.append_response_tokens([3, 4], log_probs=[-1.0, -1.0], weight_version=1, routed_experts=record)
    assert len(sample.tokens) == 2, "nothing was appended"


def test_a_sample_has_no_row_of_its_last_token() -> None:
    with pytest.raises(DataError, match="stop before the last one"):
        Sample(tokens=[1, 2], rollout_routed_experts=of_tokens([1, 2])).validate()


def test_a_group_survives_a_checkpoint_and_a_reset_forgets() -> None:
    """Fan-out siblings each have their own."""
    siblings = [
        Sample(group_index=3, index=7, tokens=[1, 2, n], rollout_routed_experts=of_tokens([1, n])) for n in (5, 6)
    ]
    group = Group(3, tuple(siblings))
    assert Group.from_dict(json.loads(group.to_json())) == group
    assert reset(siblings[0]).rollout_routed_experts is None


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
@pytest.mark.parametrize("shape", [(48, 8), (3, 2), (1, 1)])
def test_digests_tell_rows_apart(shape: tuple[int, int], dtype: Any) -> None:
    """Law: equal rows have equal digests wherever they are, others differ, also by single bits that could cancel."""
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 120, (1000, *shape)).astype(dtype)
    whole = digests_of(ids)
    assert np.array_equal(np.concatenate([digests_of(ids[:7]), digests_of(ids[7:])]), whole)
    assert len(np.unique(whole)) == len(np.unique(ids.reshape(1000, -1), axis=0))
    for bit in range(7):
        other = ids.copy()
        other[:, -1, -1] ^= 1 << bit
        if shape != (1, 1):
            other[:, 0, 0] ^= 1 << bit
        assert (digests_of(other) != whole).all()
