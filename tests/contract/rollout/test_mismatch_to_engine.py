"""Trainer and stock engine agree on the log-probs of sampled tokens: float32, worst of more than 1,000 tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_parity import one_rank, sampled
from tests.support.marks import quick

LIMIT = 1e-5


@pytest.mark.parametrize("temperature", quick([1.0, 0.7], 0.7))
def test_the_gap_is_rounding(temperature: float, engine_server: Any, tiny_model_path: Path) -> None:
    batch = sampled(engine_server.url, temperature=temperature)
    assert sum(s.response_length for s in batch.samples) >= 1000
    settings = {"rollout_temperature": temperature, "global_batch_size": 24, "mismatch_limit": LIMIT}
    with one_rank(tiny_model_path, **settings) as backend:
        metrics = backend.train(batch)
    assert 0 < metrics["train/train_rollout_logprob_abs_diff_max"] <= LIMIT
    assert metrics["train/train_rollout_logprob_abs_diff_p99"] <= metrics["train/train_rollout_logprob_abs_diff_max"]
