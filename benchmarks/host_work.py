"""Host time of a training rank for a batch: schedule, token weights, advantages, whitening and packing, on one core.

OMP_NUM_THREADS=1 python -m benchmarks.host_work --out benchmarks/results/host_work.json

No model and no GPU: log-probs and values that passes would compute are drawn at random. Each case is measured
`--rounds` times, in turn. Two clocks are read: wall time, and the CPU time of the process, which other programs on the
machine affect less. The median of each part is printed and written as JSON.

The parts before `sum` are computed for the whole batch on every rank, while its GPU waits. `rows of one rank` packs the
micro-batches of one of `--ranks` data-parallel ranks, which includes computing the weights, advantages and returns of
its samples; on a GPU, this happens beside computation, one micro-batch ahead.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime.algorithms import Algorithm
from slime.algorithms.advantages.returns import Together
from slime.algorithms.whole_batch import BatchLogProbs
from slime.core.batch import TrainBatch, TrainSample
from slime.training.step.micro_batch import PreparedBatch, prepare, to_device, with_advantages

GROUP_SIZE = 8
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"advantage_estimator": "grpo"},
    "reinforce_plus_plus": {"advantage_estimator": "reinforce_plus_plus"},
    "reinforce_plus_plus, gamma 0.999": {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.999},
    "gae": {"advantage_estimator": "ppo", "lambd": 0.95},
    "gae, one of 8 ranks": {"advantage_estimator": "ppo", "lambd": 0.95, "together": 8},
    "gae, whitened": {"advantage_estimator": "ppo", "lambd": 0.95, "normalize_advantages": True},
}
"""Name -> settings. GAE is the estimator `ppo`; REINFORCE++ whitens by default. `together`: ranks that divide the
statistics."""


def batch_of(num_samples: int, num_tokens: int, masked: float) -> TrainBatch:
    """Samples of equal length with a prompt of 256 tokens; a reward of 0 or 1 at random.

    `masked`: fraction of samples with a tool result of 1,024 tokens in the middle of the response.
    """
    rng = np.random.default_rng(0)
    response = num_tokens - 256
    log_probs = -rng.random(response, np.float32)

    def sample(index: int) -> TrainSample:
        mask = np.ones(response, np.float32)
        if index < masked * num_samples:
            mask[response // 2 : response // 2 + 1024] = 0
        return TrainSample(
            tokens=rng.integers(3, 150_000, num_tokens, dtype=np.int32),
            loss_mask=mask,
            rollout_log_probs=log_probs.copy(),
            token_versions=np.ones(response, np.int32),
            reward=float(rng.integers(2)),
            group_index=index // GROUP_SIZE,
            index=index,
            truncated=False,
        )

    return TrainBatch(0, tuple(sample(index) for index in range(num_samples)))


class Clocks:
    """Adds up wall and CPU seconds by part."""

    def __init__(self) -> None:
        self.wall_s: dict[str, float] = {}
        self.cpu_s: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.wall_s[name] = time.perf_counter() - wall
        self.cpu_s[name] = time.process_time() - cpu


def measure(batch: TrainBatch, settings: dict[str, Any], checkpoint: Path, num_ranks: int) -> Clocks:
    """Measures one case."""
    from tests.support.training import training_args

    num, clocks, together = len(batch.samples), Clocks(), settings.get("together", 1)
    settings = {name: value for name, value in settings.items() if name != "together"}
    batch = TrainBatch(batch.rollout_id, tuple(_anew(s) for s in batch.samples))
    args = training_args(
        checkpoint,
        **settings,
        rollout_batch_size=num // GROUP_SIZE,
        n_samples_per_prompt=GROUP_SIZE,
        global_batch_size=num,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=batch.samples[0].num_tokens,
        balance_data=True,
    )
    algorithm = Algorithm.of(args)
    log_probs = BatchLogProbs(old=tuple(s.rollout_log_probs for s in batch.samples))
    values = log_probs.old if algorithm.estimator.needs_critic else None
    with clocks.part("sums of masks"):
        for sample in batch.samples:
            assert sample.mask_totals.num_trained
    with clocks.part("schedule and weights"):
        prepared = prepare(batch, args, algorithm, dp_size=num_ranks)
    with clocks.part("advantages and whitening"):
        prepared = with_advantages(prepared, args, algorithm, log_probs, values, Together(size=together))
    for times in (clocks.wall_s, clocks.cpu_s):
        times["sum"] = sum(times.values())
    with clocks.part("rows of one rank"):
        pack_rows(prepared)
    return clocks


def _anew(sample: TrainSample) -> TrainSample:
    """Returns the sample without what it remembers."""
    return dataclasses.replace(sample)


def pack_rows(prepared: PreparedBatch) -> None:
    """Packs the micro-batches of rank 0, as its staging thread does."""
    for step in prepared.schedule.steps:
        for row in step.micro_batches[0]:
            to_device(prepared, row, torch.device("cpu"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=32_768, help="tokens of a sample, prompt included")
    parser.add_argument("--masked", type=float, default=0.0, help="fraction of samples with a tool result")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    from tests.support.tiny import write_tiny_model

    torch.set_num_threads(1)
    batch = batch_of(given.samples, given.tokens, given.masked)
    found: dict[str, list[Clocks]] = {name: [] for name in given.cases}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_tiny_model(Path(folder) / "model", "qwen3")
        for _ in range(given.rounds):
            for name in given.cases:
                found[name].append(measure(batch, CASES[name], checkpoint, given.ranks))
    settings = {key: value for key, value in vars(given).items() if key not in ("out", "cases")}
    result: dict[str, Any] = {
        "settings": settings,
        "processor": platform.processor() or platform.machine(),
        "cases": {},
    }
    for name, rounds in found.items():
        result["cases"][name] = {
            "wall_s": {
                part: round(statistics.median(one.wall_s[part] for one in rounds), 4) for part in rounds[0].wall_s
            },
            "cpu_s": {part: round(statistics.median(one.cpu_s[part] for one in rounds), 4) for part in rounds[0].cpu_s},
        }
        for part, seconds in result["cases"][name]["cpu_s"].items():
            wall = result["cases"][name]["wall_s"][part]
            print(f"{name:34} {part:26} {seconds:8.3f} s of CPU time, {wall:8.3f} s")
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
