"""Speedup of `--use-prefix-sharing`: training calls with and without it, alternating in one process on one GPU.

python -m benchmarks.prefix_sharing --device cuda --out prefix_sharing.json      Qwen3-0.6B's shape, 8 x (4,096 + 256)
python -m benchmarks.prefix_sharing --device cpu --shape tiny --prompt 256 --own 32     seconds, anywhere

The call is the backend's `train`, as a train actor makes it, on one group: samples of one prompt, all of whose own
tokens are trained. Weights are random, in the shape of the model. Every round has a new batch, which is trained with
and without shared prefixes; the two alternate in going first, and the first round warms up. This is repeated for each
`--max-tokens`: by default with room for one whole sample in a micro-batch, and with room for all.

Prints a line per setting and round, the medians, and one JSON record with everything, which `--out` writes to a file.
The ratio is that of a pair: seconds without sharing divided by seconds with it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.train import HERE, NCCL, commit_of
from benchmarks.training.shapes import SHAPES

SETTINGS = {"shared": True, "whole": False}
"""Name -> `--use-prefix-sharing`."""
SEED = 1234


def samples(
    num_samples: int, prompt: int, own: int, *, vocab_size: int, version: int, seed: int
) -> list[dict[str, Any]]:
    """Returns the fields of one group's train samples: `prompt` common tokens, then `own` trained tokens."""
    import numpy as np

    rng = np.random.default_rng(seed)
    common = rng.integers(0, vocab_size, prompt)
    return [
        {
            "tokens": np.concatenate([common, rng.integers(0, vocab_size, own)]).astype(np.int32),
            "loss_mask": np.ones(own, np.float32),
            "rollout_log_probs": rng.normal(-np.log(vocab_size), 0.1, own).astype(np.float32),
            "token_versions": np.full(own, version, np.int32),
            "reward": float(index % 2),
            "group_index": 0,
            "index": index,
            "truncated": False,
        }
        for index in range(num_samples)
    ]


@contextlib.contextmanager
def backend_of(tree: Any, options: argparse.Namespace, max_tokens: int) -> Iterator[Any]:
    """Yields the backend of a trainer with one rank and random weights."""
    from benchmarks.training.rank import settings_of
    from benchmarks.training.tree import random_weights
    from slime.training.parallel import destroy_process_groups
    from slime.weights.rendezvous import listen_on

    with tempfile.TemporaryDirectory(prefix="slime-prefixes-") as temporary:
        folder = Path(temporary)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(SHAPES[options.shape]))
        (folder / "prompts.jsonl").write_text('{"prompt": "unused", "label": "unused"}\n')
        spec = {
            "folder": temporary,
            "device": options.device,
            "world_size": 1,
            "mean_lengths": [options.own],
            "max_tokens": max_tokens,
            "recompute": options.recompute,
            "layout_flags": [],
            "flags": options.flags,
        }
        listener = listen_on("127.0.0.1")
        try:
            with random_weights(SEED):
                backend = tree.backend(
                    settings_of(tree, spec),
                    rank=0,
                    world_size=1,
                    local_rank=0,
                    master_address="127.0.0.1",
                    master_port=listener.getsockname()[1],
                    listener=listener,
                )
            with contextlib.closing(backend):
                backend.weight_version = 1
                yield backend
                del backend
        finally:
            destroy_process_groups()  # also if building the backend failed
            gc.collect()


def timed(backend: Any, batch: Any, *, shares: bool) -> dict[str, float]:
    """Measures one training call."""
    from benchmarks.training import measure

    backend.args = backend.args.replace(use_prefix_sharing=shares)
    measure.reset_peak(backend.device)
    with measure.counted_passes(backend) as passes:
        measure.settle(backend.device)
        start = time.perf_counter()
        metrics = backend.train(batch)
        measure.settle(backend.device)
        seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "micro_batches": passes["with_gradients"],
        "shared_tokens": metrics.get("train/shared_tokens", 0.0),
        "loss": metrics["train/loss"],
        "grad_norm": metrics["train/grad_norm"],
        "entropy": metrics["train/entropy_loss"],
        **{f"{name}_gb": value for name, value in measure.memory_gb(backend.device).items()},
    }


def measured(tree: Any, options: argparse.Namespace, max_tokens: int) -> dict[str, Any]:
    """Measures all rounds with one size of micro-batches."""
    from benchmarks.training import measure

    rounds: list[dict[str, dict[str, float]]] = []
    with backend_of(tree, options, max_tokens) as backend:
        for number in range(options.rounds + 1):
            fields = samples(
                options.samples,
                options.prompt,
                options.own,
                vocab_size=SHAPES[options.shape]["vocab_size"],
                version=backend.weight_version,
                seed=SEED + number,
            )
            order = list(SETTINGS) if number % 2 else list(SETTINGS)[::-1]
            calls = {name: timed(backend, tree.batch(fields), shares=SETTINGS[name]) for name in order}
            rounds.append(calls)
            print(f"max tokens {max_tokens}, round {number}: {told(calls)}", flush=True)
        versions = measure.versions(backend.device)
    pairs = [calls["whole"]["seconds"] / calls["shared"]["seconds"] for calls in rounds[1:]]
    norms = [abs(calls["shared"]["grad_norm"] / calls["whole"]["grad_norm"] - 1) for calls in rounds]
    return {
        "max_tokens": max_tokens,
        "versions": versions,
        "warm_up": rounds[0],
        "rounds": rounds[1:],
        "median_s": {name: statistics.median(calls[name]["seconds"] for calls in rounds[1:]) for name in SETTINGS},
        "ratios": pairs,
        "median_ratio": statistics.median(pairs),
        "largest_difference_of_gradient_norms": max(norms),
    }


def told(calls: dict[str, dict[str, float]]) -> str:
    """Returns one line about a round."""
    shared, whole = calls["shared"], calls["whole"]
    return (
        f"shared {shared['seconds']:.4f} s ({shared['micro_batches']} micro-batches, {shared['shared_tokens']:.1%} of "
        f"the tokens shared), whole {whole['seconds']:.4f} s ({whole['micro_batches']} micro-batches), ratio "
        f"{whole['seconds'] / shared['seconds']:.2f}; gradient norms {shared['grad_norm']:.6g}, "
        f"{whole['grad_norm']:.6g}"
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures all sizes of micro-batches; a size that ran out of memory has an `error`."""
    import torch

    from benchmarks.training.tree import load

    whole = options.prompt + options.own
    record: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.prefix_sharing", *options.words]),
        "commit": commit_of(HERE),
        "shape": options.shape,
        "samples": options.samples,
        "prompt_tokens": options.prompt,
        "own_tokens": options.own,
        "dtype": "bfloat16" if options.device == "cuda" else "float32",
        "sizes": [],
    }
    for max_tokens in options.max_tokens or [2 * whole - 1, options.samples * whole]:
        try:
            size = measured(load(HERE), options, max_tokens)
            medians = size["median_s"]
            print(
                f"max tokens {max_tokens}: median {medians['shared']:.4f} s shared, {medians['whole']:.4f} s whole, "
                f"median ratio {size['median_ratio']:.2f}, each {[round(x, 2) for x in size['ratios']]}",
                flush=True,
            )
        except torch.OutOfMemoryError as error:
            size = {"max_tokens": max_tokens, "error": str(error)[:300]}
            print(f"max tokens {max_tokens}: {size['error']}", flush=True)
        record["sizes"].append(size)
        if options.out is not None:
            options.out.write_text(json.dumps(record, indent=1) + "\n")
    return record


def options_of(argv: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--samples", type=int, default=8, help="samples of the group")
    parser.add_argument("--prompt", type=int, default=4096, help="common tokens")
    parser.add_argument("--own", type=int, default=256, help="tokens of each sample after the common tokens")
    parser.add_argument("--max-tokens", action="append", type=int, help="tokens of a micro-batch; may be repeated")
    parser.add_argument("--recompute", action="store_true", help="recompute the activations of every layer")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds, after one warm-up round")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--flags", default="", help="further flags of train.py, in one string")
    parser.add_argument("--out", type=Path, help="a JSON file for the record")
    options = parser.parse_args(argv)
    options.words = argv
    return options


def main() -> None:
    """Prints readable lines, then the record."""
    import os

    os.environ.update(NCCL | dict(os.environ))
    print(json.dumps(run(options_of(sys.argv[1:]))))


if __name__ == "__main__":
    main()
