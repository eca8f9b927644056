"""Laws of shared prefixes: every sample is whole in its row, sees its own past and nothing else, and nothing that two
samples have in common stands there twice."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.core.batch import TrainSample
from slime.core.routed_experts import digests_of
from slime.data.context_split import split_context
from slime.data.micro_batch_schedule import build_schedule
from slime.data.packing import PackedBatch, pack
from slime.data.shared_prefixes import LEAST_SHARED, MOST_COPIED, Prefixes
from slime.training.model.row_shards import RowPlan
from tests.support.training import forked_batch


def sample(tokens: list[int], response_length: int, group: int) -> TrainSample:
    return TrainSample(
        tokens=np.asarray(tokens, np.int32),
        loss_mask=np.ones(response_length, np.float32),
        rollout_log_probs=None,
        token_versions=np.full(response_length, -1, np.int32),
        reward=0.0,
        group_index=group,
        index=0,
        truncated=False,
    )


@st.composite
def sample_lists(draw: st.DrawFn) -> list[TrainSample]:
    """Few ids, so that any two samples may begin alike, go on alike, be equal or be one the other's beginning."""
    samples = []
    for _ in range(draw(st.integers(0, 6))):
        tokens = draw(st.lists(st.integers(0, 1), min_size=1, max_size=8))
        samples.append(sample(tokens, draw(st.integers(0, len(tokens) - 1)), draw(st.integers(0, 1))))
    return samples


def packed_row(samples: list[TrainSample], least: int, *, multiple: int = 1, each: int = 1) -> PackedBatch:
    prefixes = dataclasses.replace(Prefixes.of(samples, replays=False), least=least)
    return pack(samples, pad_to_multiple=multiple, pad_each_to=each, shared=prefixes.of_row(range(len(samples))))


@given(sample_lists(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_every_sample_is_whole_in_the_row(samples: list[TrainSample], least: int, multiple: int, each: int) -> None:
    row = packed_row(samples, least, multiple=multiple, each=each)
    assert len(row.tokens) == row.cu_seqlens[-1] == len(row.position_ids) and len(row.tokens) % multiple == 0
    ends = np.cumsum([s.response_length for s in samples])
    predicting = np.split(row.response_positions, ends)
    targets = np.split(row.target_tokens, ends)
    for s, rows, asked, wanted in zip(samples, row.token_rows, predicting, targets, strict=False):
        assert np.array_equal(row.tokens[rows], s.tokens)
        assert np.array_equal(row.position_ids[rows], np.arange(s.num_tokens))
        assert np.array_equal(asked, rows[s.num_tokens - s.response_length - 1 : -1])
        assert np.array_equal(wanted, s.tokens[s.num_tokens - s.response_length :])


@given(sample_lists())
def test_a_response_token_that_samples_share_is_asked_for_once(samples: list[TrainSample]) -> None:
    row = packed_row(samples, 1)
    positions, tokens, answers = row.log_prob_requests()
    answers = np.arange(len(positions)) if answers is None else answers
    assert np.array_equal(positions[answers], row.response_positions)
    assert np.array_equal(tokens[answers], row.target_tokens)
    assert len(set(zip(positions.tolist(), tokens.tolist(), strict=True))) == len(positions) == len(set(answers))


@given(sample_lists())
def test_what_samples_have_in_common_stands_there_once(samples: list[TrainSample]) -> None:
    """As many tokens as their tree has, and the last token again of a sample that goes nowhere new."""
    row = packed_row(samples, 1)
    paths = [[(s.group_index, *s.tokens[: k + 1].tolist()) for k in range(s.num_tokens)] for s in samples]
    tree = set(itertools.chain.from_iterable(paths))
    again = sum(any(path[-1] in before for before in paths[:i]) for i, path in enumerate(paths))
    assert len(row.tokens) == max(len(tree) + again, 1)
    assert sum(s.num_tokens for s in samples) - sum(row.num_shared) == len(tree) + again


@given(sample_lists(), st.integers(2, 5))
def test_short_prefixes_are_not_shared(samples: list[TrainSample], least: int) -> None:
    assert all(n == 0 or n >= least for n in packed_row(samples, least).num_shared)


@given(sample_lists(), st.integers(1, 3), st.integers(1, 3))
def test_a_token_sees_its_own_past_in_order(samples: list[TrainSample], cp_size: int, multiple: int) -> None:
    """However the row is cut over context-parallel ranks; without a cut by the copies of keys in the row."""
    row = packed_row(samples, 1, multiple=2 * cp_size * multiple, each=2 * cp_size)
    seen: dict[int, list[int]] = {}

    def note(queries: list[np.ndarray], keys: list[np.ndarray]) -> None:
        for asking, visible in zip(queries, keys, strict=True):
            for i, query in enumerate(asking):  # lower-right aligned: the last query sees all keys
                assert query not in seen, "every token asks once"
                seen[int(query)] = visible[: len(visible) - len(asking) + i + 1].tolist()

    if cp_size == 1 and row.prefixes is not None:
        plan = RowPlan.of(row.cu_seqlens, max_seqlen=row.max_seqlen, prefixes=row.prefixes)
        keys = np.split(plan.arrays["repeats/rows"], np.cumsum(plan.key_lengths)[:-1])
        note(np.split(np.arange(len(row.tokens)), np.cumsum(plan.query_lengths)[:-1]), keys)
        assert np.array_equal(plan.arrays["row/positions"], row.position_ids)
    for rank in range(cp_size) if not seen else ():
        cut = split_context(row.cu_seqlens, cp_rank=rank, cp_size=cp_size, prefixes=row.prefixes)
        keys = np.split(cut.order[cut.key_rows], np.cumsum(cut.key_lengths)[:-1])
        note(np.split(cut.positions, np.cumsum(cut.query_lengths)[:-1]), keys)
    assert len(seen) == len(row.tokens)
    for rows in row.token_rows:
        for k, query in enumerate(rows.tolist()):
            assert seen[query] == rows[: k + 1].tolist()


def test_the_sums_of_copies_know_every_copy() -> None:
    batch = forked_batch(1)
    row = packed_row(list(batch.samples), LEAST_SHARED)
    arrays = RowPlan.of(row.cu_seqlens, max_seqlen=row.max_seqlen, prefixes=row.prefixes).arrays
    rows, order, starts = (arrays[f"repeats/{name}"] for name in ("rows", "order", "starts"))
    assert sorted(order.tolist()) == list(range(len(rows))) and len(starts) == len(row.tokens) + 1
    for i, (a, b) in enumerate(itertools.pairwise(starts.tolist())):
        assert (rows[order[a:b]] == i).all() and (np.diff(order[a:b]) > 0).all()


def test_tokens_that_other_experts_compute_are_not_shared() -> None:
    """Law: with a record that is replayed, equal ids are not enough."""
    tokens = list(range(40))
    a, b, c = (dataclasses.replace(sample(tokens, 5, 0), routed_experts=np.zeros((39, 2, 2), np.uint8)) for _ in "abc")
    other = np.zeros((39, 2, 2), np.uint8)
    other[25, 1, 0] = 3
    b = dataclasses.replace(b, routed_experts=other)
    d = dataclasses.replace(a, routed_experts=None)
    replayed, free = (Prefixes.of([a, b, c, d], replays=replays) for replays in (True, False))
    assert [one.num_tokens for one in free.of_row(range(4))] == [0, 39, 39, 39]
    assert [one.num_tokens for one in replayed.of_row(range(4))] == [0, 25, 39, 0]


@dataclasses.dataclass(frozen=True)
class FarRecord:
    """A record on another host."""

    ids: np.ndarray
    digests: np.ndarray | None
    fetched: list[int] = dataclasses.field(default_factory=list)
    shape, dtype, nbytes = (0, 2, 2), np.dtype(np.uint8), 0

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.fetched.append(1)
        return self.ids


@given(sample_lists(), st.lists(st.integers(0, 20), min_size=6, max_size=6), st.integers(0, 2**32 - 1))
def test_records_are_compared_where_they_are(samples: list[TrainSample], ends: list[int], seed: int) -> None:
    """Law: a rank asks for no record to know what is shared; digests say what the records do."""
    rng = np.random.default_rng(seed)
    records = [
        (rng.random((min(s.num_tokens - 1, n), 2, 2)) < 0.1).astype(np.uint8)
        for s, n in zip(samples, ends, strict=False)
    ]
    here, far = (
        [dataclasses.replace(s, routed_experts=r) for s, r in zip(samples, given_records, strict=True)]
        for given_records in (records, [FarRecord(r, digests_of(r)) for r in records])
    )
    near, there = (dataclasses.replace(Prefixes.of(x, replays=True), least=1) for x in (here, far))
    row = range(len(samples))
    assert there.of_row(row) == near.of_row(row)
    assert not any(s.routed_experts.fetched for s in far if isinstance(s.routed_experts, FarRecord))


def test_records_of_samples_without_common_tokens_are_not_read() -> None:
    far = [FarRecord(np.zeros((39, 2, 2), np.uint8), None) for _ in range(3)]
    samples = [sample([i, *range(39)], 5, 0) for i in range(2)] + [sample([0, *range(39)], 5, 1)]
    samples = [dataclasses.replace(s, routed_experts=r) for s, r in zip(samples, far, strict=True)]
    assert not any(one.num_tokens for one in Prefixes.of(samples, replays=True).of_row(range(3)))
    assert not any(one.fetched for one in far)


@st.composite
def forked_lengths(draw: st.DrawFn) -> list[TrainSample]:
    """Groups of samples with a common prompt, some with a common answer, which may be longer than any micro-batch."""
    samples = []
    for group in range(draw(st.integers(1, 5))):
        prompt, common = draw(st.integers(1, 60)), draw(st.integers(0, 30))
        for i in range(draw(st.integers(1, 5))):
            own = [1000 * (i + 1) + k for k in range(draw(st.integers(1, 30)))]
            middle = list(range(500, 500 + common)) if draw(st.booleans()) else []
            samples.append(sample([*range(prompt), *middle, *own], 1, group))
    return samples


@given(forked_lengths(), st.integers(1, 3), st.integers(20, 120), st.booleans(), st.booleans())
def test_a_schedule_with_shared_prefixes(
    samples: list[TrainSample], dp_size: int, cap: int, counted: bool, balance: bool
) -> None:
    """Nothing lost or doubled; a micro-batch keeps to its limits: shared tokens count once, and keys have one, too."""
    prefixes = Prefixes.of(samples, replays=False)
    lengths = [s.num_tokens for s in samples]
    how = {"micro_batch_size": cap // 20} if counted else {"max_tokens_per_gpu": cap}
    schedule = build_schedule(
        lengths, range(len(samples)), dp_size=dp_size, num_steps=1, balance=balance, prefixes=prefixes, **how
    )
    (step,) = schedule.steps
    assert step.positions == tuple(range(len(samples)))
    assert len({len(rank) for rank in step.micro_batches}) == 1
    for positions in itertools.chain.from_iterable(step.micro_batches):
        read = sum(lengths[p] for p in positions)
        computed = read - sum(one.num_tokens for one in prefixes.of_row(positions))
        if counted:
            assert len(positions) <= cap // 20
        elif len(positions) > 1:
            assert computed <= cap and read - computed <= MOST_COPIED * cap


@pytest.mark.parametrize(("cp_size", "splits_heads"), [(1, False), (2, False), (4, False), (8, False), (4, True)])
def test_every_rank_keeps_to_the_limit_of_copies(cp_size: int, splits_heads: bool) -> None:
    """Law: copies take the memory of each context-parallel rank, so each has the limit for itself; a rank that has some
    heads of every key has as many keys more."""
    room, prompt = 17_408, list(range(16_000))
    samples = [sample([*prompt, *range(1000 * i, 1000 * i + 256)], 256, 0) for i in range(16)]
    prefixes = Prefixes.of(samples, replays=False)
    (step,) = build_schedule(
        [s.num_tokens for s in samples],
        range(16),
        dp_size=1,
        num_steps=1,
        max_tokens_per_gpu=room,
        cp_size=cp_size,
        splits_heads=splits_heads,
        prefixes=prefixes,
    ).steps
    assert any(len(positions) > 1 for positions in step.micro_batches[0]), "some samples share"
    for positions in step.micro_batches[0]:
        row = pack([samples[p] for p in positions], pad_each_to=2 * cp_size, shared=prefixes.of_row(positions))
        copies, heads = sum(row.num_shared), 1.0
        if splits_heads:
            heads = 1 / cp_size
        elif cp_size > 1:
            read, apart = (
                split_context(row.cu_seqlens, cp_rank=1, cp_size=cp_size, prefixes=x) for x in (row.prefixes, None)
            )
            copies = len(read.key_rows) - len(apart.key_rows)
        assert copies * heads <= MOST_COPIED * room


def test_a_group_that_fits_is_not_taken_apart() -> None:
    """Law: samples that share go into one micro-batch, where without sharing they would fill several."""
    batch = forked_batch(4)
    prefixes = Prefixes.of(batch.samples, replays=False)
    lengths, executions = [s.num_tokens for s in batch.samples], [s.index for s in batch.samples]
    for dp_size in (1, 2, 4):
        (step,) = build_schedule(
            lengths, executions, dp_size=dp_size, num_steps=1, max_tokens_per_gpu=130, prefixes=prefixes
        ).steps
        groups = [{batch.samples[p].group_index for p in mb} for rank in step.micro_batches for mb in rank]
        assert sorted(itertools.chain.from_iterable(groups)) == [0, 1, 2, 3], "each in one micro-batch"
    (step,) = build_schedule(
        lengths, executions, dp_size=8, num_steps=1, max_tokens_per_gpu=130, prefixes=prefixes
    ).steps
    assert all(rank[0] for rank in step.micro_batches), "no rank is idle while another has a whole group"


@given(sample_lists())
def test_in_the_order_of_the_tree_a_sample_shares_most_with_the_one_before_it(samples: list[TrainSample]) -> None:
    prefixes = dataclasses.replace(Prefixes.of(samples, replays=False), least=1)
    order = prefixes.in_tree_order(range(len(samples)))
    assert sorted(order) == list(range(len(samples)))
    for place, position in enumerate(order[1:], start=1):
        most = prefixes.longest(position, order[:place]).num_tokens
        assert prefixes.longest(position, order[place - 1 : place]).num_tokens == most


def test_a_tree_that_does_not_fit_is_divided_along_its_branches() -> None:
    """Law: what forked late stays together, in whatever order the samples come."""
    prompt, starts = list(range(20)), [list(range(1000 * i, 1000 * i + 30)) for i in (1, 2)]
    samples = [sample([*prompt, *starts[i % 2], 5000 + i], 1, 0) for i in range(12)]
    prefixes = Prefixes.of(samples, replays=False)
    (step,) = build_schedule(
        [s.num_tokens for s in samples], range(12), dp_size=1, num_steps=1, max_tokens_per_gpu=60, prefixes=prefixes
    ).steps
    assert sorted(step.micro_batches[0]) == [(0, 2, 4, 6, 8, 10), (1, 3, 5, 7, 9, 11)]


def test_counted_samples_make_no_more_micro_batches_for_being_shared() -> None:
    """Law: where samples are counted a group goes on in the next micro-batch; those that meet in one share."""
    samples = [sample([*range(40), i], 1, i // 5) for i in range(80)]
    prefixes = Prefixes.of(samples, replays=False)
    how = {"dp_size": 1, "num_steps": 1, "micro_batch_size": 8}
    (step,) = build_schedule([41] * 80, range(80), prefixes=prefixes, **how).steps
    assert [len(positions) for positions in step.micro_batches[0]] == [8] * 10
    for positions in step.micro_batches[0]:
        groups = {samples[p].group_index for p in positions}
        assert sum(one.num_tokens > 0 for one in prefixes.of_row(positions)) == len(positions) - len(groups)


@given(forked_lengths(), st.integers(1, 3), st.integers(20, 120), st.booleans())
def test_nothing_changes_where_nothing_is_shared(
    samples: list[TrainSample], dp_size: int, cap: int, balance: bool
) -> None:
    apart = [dataclasses.replace(s, group_index=i) for i, s in enumerate(samples)]
    how = {"dp_size": dp_size, "num_steps": 1, "max_tokens_per_gpu": cap, "balance": balance}
    lengths = [s.num_tokens for s in samples]
    with_prefixes = build_schedule(lengths, range(len(samples)), prefixes=Prefixes.of(apart, replays=False), **how)
    assert with_prefixes == build_schedule(lengths, range(len(samples)), **how)
