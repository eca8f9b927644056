"""Trainer and stock engine agree on the log-probs of sampled tokens: float32, worst of more than 1,000 tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from slime.core.batch import TrainBatch, TrainSample

LIMIT = 1e-5


def _sample(url: str, temperature: float, num: int = 24, length: int = 48) -> TrainBatch:
    rng = np.random.default_rng(7)
    prompts = [rng.integers(3, 100, int(rng.integers(2, 30))).tolist() for _ in range(num)]
    body = {
        "input_ids": prompts,
        "sampling_params": {"temperature": temperature, "max_new_tokens": length, "ignore_eos": True},
        "return_logprob": True,
    }
    answers = httpx.post(f"{url}/generate", json=body, timeout=200).raise_for_status().json()
    samples = []
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        chosen = answer["meta_info"]["output_token_logprobs"]
        samples.append(
            TrainSample(
                tokens=np.asarray(prompt + [c[1] for c in chosen], np.int64),
                loss_mask=np.ones(len(chosen), np.float32),
                rollout_log_probs=np.asarray([c[0] for c in chosen], np.float32),
                token_versions=np.ones(len(chosen), np.int32),
                reward=float(rng.normal()),
                group_index=index // 2,
                index=index,
                truncated=True,
            )
        )
    return TrainBatch(rollout_id=0, samples=tuple(samples))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gap_is_rounding(
    temperature: float, engine_server: Any, tiny_model_path: Path, make_backend: Callable[..., Any]
) -> None:
    batch = _sample(engine_server.url, temperature)
    assert sum(s.response_length for s in batch.samples) >= 1000
    backend = make_backend(
        tiny_model_path, rollout_temperature=temperature, global_batch_size=24, logprob_gap_limit=LIMIT
    )
    metrics = backend.train(batch)
    assert 0 < metrics["train/logprob_gap_max"] <= LIMIT
    assert metrics["train/logprob_gap_p99"] <= metrics["train/logprob_gap_max"]
