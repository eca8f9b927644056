"""CPU time of a training rank for a batch before the first pass, in seconds: schedule, token weights, advantages.

python -m benchmarks.host_work --samples 512 --tokens 32768 --estimator grpo reinforce_plus_plus

No model and no GPU: the log-probs that passes would compute are drawn at random. Each estimator is measured `--rounds`
times, in turn, and the median of each part is printed, with a JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from slime.algorithms.from_settings import Algorithm
from slime.algorithms.whole_batch import BatchLogProbs
from slime.core.batch import TrainBatch, TrainSample
from slime.training.step.micro_batch import prepare, with_advantages

GROUP_SIZE = 8


def batch_of(num_samples: int, num_tokens: int) -> TrainBatch:
    """Samples of equal length with a prompt of 256 tokens; a reward of 0 or 1 at random."""
    rng = np.random.default_rng(0)
    response = num_tokens - 256
    samples = (
        TrainSample(
            tokens=rng.integers(3, 150_000, num_tokens),
            loss_mask=np.ones(response, np.float32),
            rollout_log_probs=-rng.random(response, np.float32),
            token_versions=np.ones(response, np.int32),
            reward=float(rng.integers(2)),
            group_index=index // GROUP_SIZE,
            index=index,
            truncated=False,
        )
        for index in range(num_samples)
    )
    return TrainBatch(0, tuple(samples))


def measure(batch: TrainBatch, estimator: str, checkpoint: Path) -> dict[str, float]:
    """Returns the seconds of each part."""
    from tests.support.training import training_args

    num = len(batch.samples)
    args = training_args(
        checkpoint,
        advantage_estimator=estimator,
        rollout_batch_size=num // GROUP_SIZE,
        n_samples_per_prompt=GROUP_SIZE,
        global_batch_size=num,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=batch.samples[0].num_tokens,
        balance_data=True,
    )
    algorithm = Algorithm.of(args)
    began = time.perf_counter()
    prepared = prepare(batch, args, algorithm, dp_size=8)
    ready = time.perf_counter()
    old = tuple(np.asarray(s.rollout_log_probs, np.float64) for s in batch.samples)
    drawn = time.perf_counter()
    with_advantages(prepared, args, algorithm, BatchLogProbs(old=old))
    return {"schedule and weights": ready - began, "advantages": time.perf_counter() - drawn}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32_768, help="tokens of a sample, prompt included")
    parser.add_argument("--estimator", nargs="+", default=["grpo", "reinforce_plus_plus"])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    from tests.support.tiny import write_tiny_model

    batch = batch_of(given.samples, given.tokens)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in given.estimator}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_tiny_model(Path(folder) / "model", "qwen3")
        for _ in range(given.rounds):
            for name in given.estimator:
                found[name].append(measure(batch, name, checkpoint))
    result: dict[str, Any] = {"samples": given.samples, "tokens": given.tokens, "rounds": given.rounds, "seconds": {}}
    for name, rounds in found.items():
        result["seconds"][name] = {part: statistics.median(one[part] for one in rounds) for part in rounds[0]}
        for part, seconds in result["seconds"][name].items():
            print(f"{name:24} {part:24} {seconds:8.3f} s")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
