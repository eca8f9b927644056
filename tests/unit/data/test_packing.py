"""Laws of packing: every trained token sits, once, at the position that predicts it; sequences never mix."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.core.batch import TrainSample
from slime.core.errors import ConfigError, DataError
from slime.data.packing import PackedBatch, pack


def make(prompt: list[int], response: list[int], mask: list[float] | None = None) -> TrainSample:
    return TrainSample(
        tokens=np.asarray(prompt + response, np.int64),
        loss_mask=np.asarray([1.0] * len(response) if mask is None else mask, np.float32),
        rollout_log_probs=None,
        token_versions=np.full(len(response), -1, np.int32),
        reward=0.0,
        group_index=0,
        index=0,
        truncated=False,
    )


ids = st.lists(st.integers(1, 99), max_size=6)


@st.composite
def sample(draw: st.DrawFn) -> TrainSample:
    response = draw(ids)
    mask = [float(draw(st.booleans())) for _ in response]
    return make([draw(st.integers(1, 99)), *draw(ids)], response, mask)


batches = st.tuples(st.lists(sample(), max_size=5), st.integers(1, 9))


def sequences(packed: PackedBatch, array: np.ndarray) -> list[np.ndarray]:
    return [array[a:b] for a, b in zip(packed.cu_seqlens[:-1], packed.cu_seqlens[1:], strict=True)]


@given(batches)
def test_sequences_survive_in_order_and_padding_is_its_own(batch) -> None:
    samples, multiple = batch
    packed = pack(samples, pad_to_multiple=multiple)
    num_tokens = len(packed.tokens)
    assert num_tokens % multiple == 0 and num_tokens >= 1
    assert num_tokens - max(sum(s.num_tokens for s in samples), 1) < multiple
    parts = sequences(packed, packed.tokens)
    assert packed.cu_seqlens[0] == 0 and packed.cu_seqlens[-1] == num_tokens
    assert all(np.array_equal(a, s.tokens) for a, s in zip(parts, samples, strict=False))
    assert 0 <= len(parts) - len(samples) <= 1
    assert packed.max_seqlen == max(map(len, parts))
    assert all(np.array_equal(p, np.arange(len(p))) for p in sequences(packed, packed.position_ids))
    if len(parts) > len(samples):
        assert (packed.response_positions < packed.cu_seqlens[-2]).all(), "padding predicts nothing"


@given(batches)
def test_targets_are_the_response_and_are_predicted_by_the_token_before(batch) -> None:
    samples, multiple = batch
    packed = pack(samples, pad_to_multiple=multiple)
    responses = [s.tokens[s.num_tokens - s.response_length :] for s in samples]
    assert packed.target_tokens.tolist() == [token for response in responses for token in response]
    assert np.array_equal(np.append(packed.tokens, 0)[packed.response_positions + 1], packed.target_tokens)


@given(batches)
def test_each_response_token_has_a_position_of_its_own(batch) -> None:
    samples, multiple = batch
    packed = pack(samples, pad_to_multiple=multiple)
    assert len(set(packed.response_positions.tolist())) == sum(s.response_length for s in samples)


def test_dtypes_and_the_dummy() -> None:
    packed = pack([], pad_to_multiple=4)
    assert packed.tokens.tolist() == [0] * 4 and packed.cu_seqlens.tolist() == [0, 4]
    assert pack([]).tokens.tolist() == [0] and not len(pack([]).response_positions)
    assert (packed.tokens.dtype, packed.cu_seqlens.dtype) == (np.int64, np.int32)
    assert packed.response_positions.dtype == np.int64


def test_what_cannot_be_predicted_is_refused() -> None:
    with pytest.raises(DataError, match="prompt"):
        pack([make([], [1, 2])])
    with pytest.raises(DataError, match="no tokens"):
        pack([make([], [])])
    with pytest.raises(ConfigError):
        pack([make([1], [2])], pad_to_multiple=0)
