"""Cost of micro-batches of one sample compared with micro-batches filled by tokens, for the same training step.

python -m benchmarks.micro_batches            one rank on a CPU, float32; minutes

One process trains the same 16 samples repeatedly, alternating between the two settings. Everything else stays the same,
so only the number of passes and their tokens differ. Prints a table and a JSON line: wall and processor seconds of a
step (medians), and the median of the ratios of pairs, which other work on the machine disturbs least. Also compares the
two gradients.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

SETTINGS: dict[str, dict[str, Any]] = {
    "micro_batch_size 1": {"use_dynamic_batch_size": False, "max_tokens_per_gpu": None},
    "filled by tokens": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 2048},
}
"""Flags for micro-batches of one sample, and for the default, micro-batches filled by tokens."""
NUM_SAMPLES = 16
SIZES: dict[str, dict[str, int]] = {
    "135M": {"hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "vocab_size": 49152},
    "15M": {"hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 768, "vocab_size": 16384},
}
"""Name -> dimensions of a model; the first model is SmolLM2-135M."""


def write_model(folder: Path, size: str) -> Path:
    """Writes a model with random weights and head size 64."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    heads = SIZES[size]["hidden_size"] // 64
    config = Qwen3Config(
        **SIZES[size],
        num_attention_heads=heads,
        num_key_value_heads=1,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def batch(vocab_size: int, *, shortest: int, longest: int) -> Any:
    """Returns 16 samples in groups of 4. Half of a sample is its prompt; every group has rewards of 0 and 1."""
    import numpy as np

    from slime.core.batch import TrainBatch, TrainSample

    rng = np.random.default_rng(0)
    samples = []
    for index in range(NUM_SAMPLES):
        length = int(rng.integers(shortest, longest + 1))
        response = length // 2
        samples.append(
            TrainSample(
                tokens=rng.integers(3, vocab_size, length).astype(np.int64),
                loss_mask=np.ones(response, np.float32),
                rollout_log_probs=np.full(response, -10.0, np.float32),
                token_versions=np.ones(response, np.int32),
                reward=float(index % 2),
                group_index=index // 4,
                index=index,
                truncated=False,
            )
        )
    return TrainBatch(0, tuple(samples))


def measure(size: str, rounds: int, shortest: int, longest: int) -> dict[str, Any]:
    """Returns the results of both settings, and the ratio of the first to the second."""
    from tests.support.engine_parity import one_rank

    samples = batch(SIZES[size]["vocab_size"], shortest=shortest, longest=longest)
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in SETTINGS}
    norms: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        one_rank(write_model(Path(folder), size), global_batch_size=NUM_SAMPLES, megatron={"lr": 0.0}) as backend,
    ):
        for turn in range(rounds + 1):
            for name, settings in SETTINGS.items():
                backend.args = backend.args.replace(micro_batch_size=1, **settings)
                wall, cpu = time.perf_counter(), time.process_time()
                norms[name] = backend.train(samples)["train/grad_norm"]
                if turn:  # the first round warms up
                    spent[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    one, filled = (spent[name] for name in SETTINGS)
    return {
        "size": size,
        "tokens_of_samples": [s.num_tokens for s in samples.samples],
        "rounds": rounds,
        "seconds": {
            name: {"wall": [w for w, _ in pairs], "cpu": [c for _, c in pairs]} for name, pairs in spent.items()
        },
        "ratio_wall": statistics.median(a / b for (a, _), (b, _) in zip(one, filled, strict=True)),
        "ratio_cpu": statistics.median(a / b for (_, a), (_, b) in zip(one, filled, strict=True)),
        "gradient_norms": norms,
    }


def main() -> None:
    """Prints a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="135M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shortest", type=int, default=32, help="tokens of the shortest sample")
    parser.add_argument("--longest", type=int, default=96, help="tokens of the longest sample")
    given = parser.parse_args()
    found = measure(given.size, given.rounds, given.shortest, given.longest)
    for name, seconds in found["seconds"].items():
        wall, cpu = statistics.median(seconds["wall"]), statistics.median(seconds["cpu"])
        print(f"{name:<20} {wall:6.2f} s, processor {cpu:6.2f} s")
    print(f"ratio {found['ratio_wall']:.2f}, of processor time {found['ratio_cpu']:.2f}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
