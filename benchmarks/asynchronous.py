"""Sync, partial rollout and fully async on the tiny model: samples per second and reward, with heavy-tailed lengths.

    python -m benchmarks.asynchronous [--seeds 3] [--steps 24] [--lr 1e-2] [--modes sync ...] [--keep DIR]

Each sample has a fixed length, drawn by its id from a Pareto distribution. So every mode has the same work per sample,
and the reward (the fraction of digits in the response) cannot depend on the length. Each seed has its own model, order
of prompts and lengths. The modes of a seed run one after the other before the next seed, so a drift of the machine
affects all of them. Steps before `WARM_UP` are not timed.

A mode that trains short responses first has more samples per second with less work. So trained and sampled tokens
(`requests.jsonl` of a run folder: one line per engine response) are counted as well, and the table shows the mean
lengths of trained and issued samples. Needs two cores and no GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from slime.core.sample import Sample
from slime.rollout.generate import generate

ROOT = Path(__file__).parents[1]
SHORTEST, LONGEST, SHAPE = 30, 600, 1.1
"""The shortest and the longest length in tokens, and the exponent of the tail of the Pareto distribution."""
PROMPTS, SAMPLES, WARM_UP = 8, 4, 4
EVAL_PROMPTS, EVAL_SAMPLES, EVAL_TOKENS = 64, 4, 32
T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57}
"""Student's t for a two-sided 95 % interval, by degrees of freedom."""

FULLY_ASYNC = ["--fully-async", "--max-weight-staleness", "4"]
MODES: dict[str, tuple[str, list[str]]] = {
    "sync": ("train.py", []),
    "partial": ("train.py", ["--partial-rollout", "--over-sampling-batch-size", str(2 * PROMPTS)]),
    "fully_async": ("train_async.py", FULLY_ASYNC),
    "one_step_off": ("train_async.py", []),
    "retract": ("train_async.py", [*FULLY_ASYNC, "--pause-generation-mode", "retract"]),
    "in_place": ("train_async.py", [*FULLY_ASYNC, "--pause-generation-mode", "in_place"]),
}


def length_of(index: int, seed: int) -> int:
    """Returns the length in tokens of the sample with this id."""
    return min(LONGEST, int(SHORTEST * random.Random(f"{seed} {index}").paretovariate(SHAPE)))


async def generate_heavy_tailed(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Samples as many tokens as the sample's id determines, or in an evaluation (negative ids) the given maximum."""
    index, before = sample.index or 0, sample.response_length
    most = sampling_params["max_new_tokens"] if index < 0 else length_of(index, args.rollout_seed)
    sample = await generate(args, sample, {**sampling_params, "max_new_tokens": most, "ignore_eos": True})
    if index >= 0:
        row = {"time": time.time(), "index": index, "tokens": sample.response_length - before}
        await asyncio.to_thread(_append, Path(args.run_dir) / "requests.jsonl", row)
    return sample


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def command_of(mode: str, folder: Path, seed: int, num_steps: int, lr: str) -> list[str]:
    """Returns the command line of one run."""
    script, flags = MODES[mode]
    command = [
        sys.executable,
        script,
        "--hf-checkpoint",
        folder / f"model-{seed}",
        "--run-dir",
        folder / f"{mode}-{seed}",
        "--prompt-data",
        folder / "digits.jsonl",
        "--input-key",
        "prompt",
        "--label-key",
        "label",
        "--apply-chat-template",
        "--rollout-shuffle",
        "--rollout-seed",
        seed,
        "--seed",
        seed,
        "--custom-generate-function-path",
        "benchmarks.asynchronous:generate_heavy_tailed",
        "--custom-rm-path",
        "recipes.tiny.tasks:digit_fraction",
        "--rollout-batch-size",
        PROMPTS,
        "--n-samples-per-prompt",
        SAMPLES,
        "--rollout-max-response-len",
        LONGEST,
        "--num-rollout",
        num_steps,
        "--eval-prompt-data",
        "held_out",
        folder / "held_out.jsonl",
        "--eval-interval",
        num_steps,
        "--skip-eval-before-train",
        "--n-samples-per-eval-prompt",
        EVAL_SAMPLES,
        "--eval-max-response-len",
        EVAL_TOKENS,
        "--no-bf16",
        "--lr",
        lr,
        "--lr-decay-style",
        "constant",
        "--update-weight-transport",
        "tensor",
        "--use-dynamic-batch-size",
        "--max-tokens-per-gpu",
        "8192",
        *flags,
    ]
    return [str(c) for c in command]


def read(folder: Path) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Reads a run's metrics, one dict per step with the time at which the step was trained, and its requests."""
    steps: dict[int, dict[str, float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "train/step" in row:
            row["trained_at"] = row["time"]
        for axis in ("rollout/step", "train/step", "eval/step"):
            if axis in row:
                steps.setdefault(int(row[axis]), {}).update(row)
    requests = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    return [steps[step] for step in sorted(steps)], requests


def measure(steps: list[dict[str, float]], requests: list[dict[str, float]], seed: int) -> dict[str, float]:
    """Returns the results of one run. Rates cover the time from the end of the warm-up to the end of the last step,
    so neither startup nor evaluation counts; lengths and the mean reward cover all steps.
    """
    begin, end = steps[WARM_UP - 1]["trained_at"], steps[-1]["trained_at"]
    timed, seconds = steps[WARM_UP:], end - begin
    num, tokens = PROMPTS * SAMPLES * len(timed), sum(step["rollout/response_tokens"] for step in timed)
    issued = [length_of(i, seed) for i in range(PROMPTS * SAMPLES * len(steps))]
    every = sum(step["rollout/response_tokens"] for step in steps)
    sampled = sum(r["tokens"] for r in requests if begin < r["time"] <= end)
    return {
        "seconds": seconds,
        "samples_per_s": num / seconds,
        "tokens_per_s": tokens / seconds,
        "sampled_per_s": sampled / seconds,
        "trained_length": every / len(issued),
        "issued_length": statistics.fmean(issued),
        "started_over": steps[-1].get("data/returned/stale", 0.0),
        "oldest": max(step["rollout/staleness/max"] for step in steps),
        "age": statistics.fmean(step["rollout/staleness/mean"] for step in timed),
        "train_s": sum(step["perf/train_time"] for step in timed[:-1]) / len(timed[:-1]),
        "sync_s": sum(step["perf/update_weights_time"] for step in timed[:-1]) / len(timed[:-1]),
        "reward": steps[-1]["eval/held_out"],
        "mean_reward": statistics.fmean(step["rollout/raw_reward"] for step in steps),
    }


def run(mode: str, folder: Path, seed: int, num_steps: int, lr: str) -> dict[str, float]:
    """Starts one run and returns its results."""
    with (folder / f"{mode}-{seed}.log").open("w") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = command_of(mode, folder, seed, num_steps, lr)
        subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, check=True)
    return measure(*read(folder / f"{mode}-{seed}"), seed)


def difference(of: list[float], to: list[float]) -> str:
    """Returns the mean difference of pairs with its 95 % interval."""
    gaps = [a - b for a, b in zip(of, to, strict=True)]
    if len(gaps) < 2:
        return f"{gaps[0]:+.3f}"
    half = T_95.get(len(gaps) - 1, 1.96) * statistics.stdev(gaps) / math.sqrt(len(gaps))
    return f"{statistics.fmean(gaps):+.3f} ± {half:.3f}"


Figures = dict[str, list[dict[str, float]]]
"""Mode -> the figures of each seed."""


def ratio(figures: Figures, mode: str, key: str) -> str:
    """Returns the ratio to the first mode: mean, minimum and maximum over the seeds."""
    first = next(iter(figures.values()))
    each = [a[key] / b[key] for a, b in zip(figures[mode], first, strict=True)]
    return f"{statistics.fmean(each):.2f}x ({min(each):.2f}-{max(each):.2f})"


def speeds(figures: Figures) -> str:
    """Returns a table of means over the seeds with a row per mode, and ratios with their minimum and maximum."""
    rows = [
        "| mode | samples/s | | trained tokens/s | | sampled tokens/s | mean length trained, issued | "
        "age of a token: mean, oldest | train s | weight sync s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, mode in figures.items():
        mean = {key: statistics.fmean(m[key] for m in mode) for key in mode[0]}
        oldest = max(m["oldest"] for m in mode)
        rows.append(
            f"| {name} | {mean['samples_per_s']:.2f} | {ratio(figures, name, 'samples_per_s')} | "
            f"{mean['tokens_per_s']:.0f} | {ratio(figures, name, 'tokens_per_s')} | {mean['sampled_per_s']:.0f} | "
            f"{mean['trained_length']:.0f}, {mean['issued_length']:.0f} | {mean['age']:.1f}, {oldest:.0f} | "
            f"{mean['train_s']:.2f} | {mean['sync_s']:.2f} |"
        )
    return "\n".join(rows)


def rewards(figures: Figures) -> str:
    """Returns a table of the reward: mean, standard deviation, paired difference to the first mode, 95 % interval."""
    rows = ["| mode | final reward by seed | mean ± sd | to the first | mean while training | to the first |"]
    rows.append("|---|---|---|---|---|---|")
    first = next(iter(figures.values()))
    for name, mode in figures.items():
        cells = [name, ", ".join(f"{m['reward']:.3f}" for m in mode)]
        for key in ("reward", "mean_reward"):
            each, others = [m[key] for m in mode], [m[key] for m in first]
            spread = statistics.stdev(each) if len(each) > 1 else 0.0
            cells += [f"{statistics.fmean(each):.3f} ± {spread:.3f}", difference(each, others)]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    """Runs every mode of every seed, and prints the table after each seed."""
    from recipes.tiny.tasks import digits_rows, write_rows
    from tests.support.tiny import write_tiny_model

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--lr", default="1e-2", help="learning rate of every mode")
    parser.add_argument("--modes", nargs="+", default=["sync", "partial", "fully_async"], choices=list(MODES))
    parser.add_argument("--keep", type=Path, default=None)
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="slime-async-"))
    write_rows(folder / "digits.jsonl", digits_rows(512))
    write_rows(folder / "held_out.jsonl", digits_rows(EVAL_PROMPTS, seed=1))
    figures: dict[str, list[dict[str, float]]] = {mode: [] for mode in options.modes}
    for seed in range(1, options.seeds + 1):
        write_tiny_model(folder / f"model-{seed}", "qwen3", seed=seed)
        for mode in options.modes:
            figures[mode].append(run(mode, folder, seed, options.steps, options.lr))
            (folder / "figures.json").write_text(json.dumps(figures, indent=1))
            print(
                f"seed {seed} {mode}: {json.dumps({k: round(v, 3) for k, v in figures[mode][-1].items()})}", flush=True
            )
        print(f"{speeds(figures)}\n\n{rewards(figures)}\n", flush=True)


if __name__ == "__main__":
    main()
