"""What a rehearsal tells: the line through two sizes, the number of tokens that fits, and what to do about it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.training.rehearsal import Largest, Passes, num_under_way, refusal, rehearsed_batch

GB = 10**9


@given(
    base=st.integers(0, 5 * GB),
    slope=st.integers(1, 10**6),
    small=st.integers(1, 4000),
    more=st.integers(1, 30_000),
    tokens=st.integers(1, 200_000),
)
def test_a_line_is_found_and_what_fits_fits(base: int, slope: int, small: int, more: int, tokens: int) -> None:
    large = small + more
    passes = Passes((small, large), (base + slope * small, base + slope * large))
    assert passes.peak(tokens) == pytest.approx(base + slope * tokens, rel=1e-9, abs=2)
    fitting = passes.fitting(base + slope * tokens)
    assert abs(fitting - tokens) <= 1
    assert passes.peak(fitting) <= base + slope * tokens + 2


def test_one_size_alone_is_taken_for_proportional() -> None:
    passes = Passes((100, 100), (500, 500))
    assert (passes.bytes_per_token, passes.peak(200), passes.fitting(250)) == (5.0, 1000, 50)
    assert [Passes((100, 200), (500, 500)).fitting(room) for room in (500, 499)] == [200, 0]


@given(tokens=st.integers(1, 200_000), chunk=st.sampled_from([-1, 16, 1024, 5000]))
def test_sizes_are_small_and_fill_a_chunk(tokens: int, chunk: int) -> None:
    small, large = Largest(tokens, None).sizes(chunk)
    assert 1 <= small <= large <= tokens
    assert small >= min(tokens, max(chunk, 1)) and large >= min(tokens, 2 * max(chunk, 1))
    if tokens >= 8 * max(chunk, 1):
        assert (small, large) == (tokens // 8, tokens // 4)


def test_sizes_are_those_from_which_memory_grows_linearly() -> None:
    """As long as the largest micro-batch is."""
    assert Largest(32_000, None).sizes(1024, 2049) == (4000, 8000)
    assert Largest(8000, None).sizes(1024, 2049) == (2049, 4098)
    assert Largest(3000, None).sizes(1024, 2049) == (2049, 3000)
    assert Largest(2048, None).sizes(1024, 2049) == Largest(2048, None).sizes(1024) == (1024, 2048)


def test_the_largest_micro_batch_is_what_the_limits_say() -> None:
    def largest(cp_size: int, **given: Any) -> Largest:
        limits = {"rollout_max_context_len": None, "rollout_max_prompt_len": 100, "rollout_max_response_len": 900}
        limits["rollout_max_total_response_len"] = None
        args: Any = SimpleNamespace(**limits, **given)
        return Largest.of(args, cp_size)

    assert largest(2, use_dynamic_batch_size=True, max_tokens_per_gpu=4096) == Largest(4096, None)
    long = largest(1, use_dynamic_batch_size=True, max_tokens_per_gpu=600)
    assert long == Largest(1000, None), "a sample is never split"
    assert largest(1, use_dynamic_batch_size=False, micro_batch_size=3) == Largest(3000, 3)
    assert largest(2, use_dynamic_batch_size=False, micro_batch_size=3) == Largest(1500, 3)


def test_a_refusal_names_the_number_that_fits() -> None:
    passes = Passes((1000, 2000), (2 * GB, 3 * GB))  # 1 GB and 1 MB a token

    def text(largest: Largest, kept_bytes: int) -> str:
        room = 80 * GB
        return refusal(largest, passes, passes.fitting(room - kept_bytes), kept_bytes=kept_bytes, gpu_bytes=room)

    by_tokens = text(Largest(60_000, None), 20 * GB)
    assert "60,000 tokens" in by_tokens and "need 61.0 GB in addition to 20.0 GB" in by_tokens
    assert "about 59,000 tokens fit: set --max-tokens-per-gpu to 59000 or less" in by_tokens
    assert "--micro-batch-size to 7 or less" in text(Largest(64_000, 8), 20 * GB)
    nothing = text(Largest(2000, None), 80 * GB)
    assert "about 0 tokens fit: recompute activations" in nothing and "--max-tokens-per-gpu" not in nothing


@pytest.mark.parametrize(
    ("num_stages", "num_chunks", "multiple", "num"),
    [(1, 1, 1, 2), (4, 1, 1, 4), (2, 2, 2, 4), (4, 2, 4, 8)],
)
def test_a_pipeline_is_filled(num_stages: int, num_chunks: int, multiple: int, num: int) -> None:
    """Megatron's warm-up of the first of 4 stages with 2 chunks is 2 * 3 + 4 passes, and one more is under way."""
    assert num_under_way(num_stages, num_chunks, multiple) == num
    assert num % multiple == 0


def test_every_rank_rehearses_as_many_micro_batches_of_that_size() -> None:
    prepared = rehearsed_batch(3, 2, 50, vocab_size=7)
    (step,) = prepared.schedule.steps
    assert step.micro_batches == (((0,), (1,), (2,)), ((3,), (4,), (5,)))
    assert all(s.num_tokens == 50 and s.response_length == 49 for s in prepared.batch.samples)
    assert all(int(s.tokens.max()) < 7 for s in prepared.batch.samples)
    again = rehearsed_batch(3, 2, 50, vocab_size=7)
    assert all(
        np.array_equal(a.tokens, b.tokens) for a, b in zip(prepared.batch.samples, again.batch.samples, strict=True)
    )
