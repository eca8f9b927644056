"""Laws of the context-parallel cut: nothing lost or doubled, equal work, and exactly the keys that causality allows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.core.batch import TrainSample
from slime.core.errors import ConfigError, DataError
from slime.data.context_split import context_positions, split_context
from slime.data.packing import pack


def samples_of(lengths: list[int]) -> list[TrainSample]:
    return [
        TrainSample(
            tokens=np.arange(100 * i, 100 * i + n, dtype=np.int64),
            loss_mask=np.ones(n - 1, np.float32),
            rollout_log_probs=None,
            token_versions=np.full(n - 1, -1, np.int32),
            reward=0.0,
            group_index=0,
            index=i,
            truncated=False,
        )
        for i, n in enumerate(lengths)
    ]


rows = st.tuples(st.lists(st.integers(1, 20), max_size=4), st.integers(1, 4), st.integers(1, 3))


@given(rows)
def test_ranks_hold_the_row_once_and_see_exactly_the_past(row: tuple[list[int], int, int]) -> None:
    lengths, cp_size, tp_size = row
    packed = pack(samples_of(lengths), pad_to_multiple=2 * cp_size * tp_size, pad_each_to=2 * cp_size)
    cu, num_tokens = packed.cu_seqlens, len(packed.tokens)
    held = [context_positions(cu, cp_rank=r, cp_size=cp_size) for r in range(cp_size)]
    assert {len(h) for h in held} == {num_tokens // cp_size} and num_tokens % (cp_size * tp_size) == 0
    gathered = np.concatenate(held)
    assert np.array_equal(np.sort(gathered), np.arange(num_tokens))
    sequence = np.repeat(np.arange(len(cu) - 1), np.diff(cu))
    work = set()
    for rank in range(cp_size):
        cut = split_context(cu, cp_rank=rank, cp_size=cp_size)
        assert np.array_equal(cut.local_index[cut.positions], np.arange(len(cut.positions)))
        assert (cut.local_index >= 0).sum() == len(cut.positions)
        assert np.array_equal(cut.order, gathered) and np.array_equal(cut.order[cut.place], np.arange(num_tokens))
        seen = np.split(gathered[cut.key_rows], np.cumsum(cut.key_lengths)[:-1])
        asking = np.split(cut.positions, np.cumsum(cut.query_lengths)[:-1])
        pairs = 0
        for queries, keys in zip(asking, seen, strict=True):
            for i, position in enumerate(queries):  # lower-right aligned: the last query sees all keys
                visible = keys[: len(keys) - len(queries) + i + 1]
                assert np.array_equal(visible, np.arange(cu[sequence[position]], position + 1))
                pairs += len(visible)
        work.add(pairs)
    assert len(work) == 1, "causal attention costs all ranks the same"


@given(st.lists(st.integers(1, 20), max_size=4), st.integers(1, 5), st.integers(1, 5))
def test_padding_stands_behind_each_sequence_and_trains_nothing(lengths: list[int], each: int, multiple: int) -> None:
    plain, padded = pack(samples_of(lengths)), pack(samples_of(lengths), pad_each_to=each, pad_to_multiple=multiple)
    assert len(padded.tokens) % multiple == 0 and not (np.diff(padded.cu_seqlens) % each).any()
    assert np.array_equal(padded.target_tokens, plain.target_tokens)
    for name in ("tokens", "position_ids"):
        got, want = (getattr(p, name)[p.response_positions] for p in (padded, plain))
        assert np.array_equal(got, want), name
    for start, n, i in zip(padded.cu_seqlens, lengths, range(len(lengths)), strict=False):
        assert np.array_equal(padded.tokens[start : start + n], np.arange(100 * i, 100 * i + n))
    assert len(padded.response_positions) == len(plain.response_positions)


def test_an_uneven_split_is_refused() -> None:
    with pytest.raises(DataError, match="pad_each_to=4"):
        context_positions(np.asarray([0, 6]), cp_rank=0, cp_size=2)
    with pytest.raises(ConfigError, match="pad_each_to=0"):
        pack([], pad_each_to=0)
