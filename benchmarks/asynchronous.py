"""Samples per second of the loops on the tiny model, with response lengths of a heavy tail.

    python -m benchmarks.asynchronous [--steps 8] [--modes sync partial ... in_place] [--keep DIR]

Each sample has a length of its own, drawn by its id from a Pareto distribution, so that every mode has the same work
per sample; the model never ends by itself. Steps before `WARM_UP` are left out. Needs two cores and no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from slime.core.sample import Sample
from slime.rollout.generate import generate

ROOT = Path(__file__).parents[1]
SHORTEST, LONGEST, SHAPE = 20, 900, 1.1
"""Of the lengths: tokens, tokens, exponent of the tail."""
PROMPTS, SAMPLES, WARM_UP = 8, 4, 2

WORKER = ["--fully-async", "--max-weight-staleness", "4"]
MODES: dict[str, tuple[str, list[str]]] = {
    "sync": ("train.py", []),
    "partial": ("train.py", ["--partial-rollout", "--over-sampling-batch-size", "16"]),
    "one_step_off": ("train_async.py", []),
    "fully_async": ("train_async.py", WORKER),
    "retract": ("train_async.py", [*WORKER, "--pause-generation-mode", "retract"]),
    "in_place": ("train_async.py", [*WORKER, "--pause-generation-mode", "in_place"]),
}


def length_of(index: int) -> int:
    """Tokens of the sample with this id."""
    return min(LONGEST, int(SHORTEST * random.Random(index).paretovariate(SHAPE)))


async def generate_heavy_tailed(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """As many tokens as the sample's id asks for."""
    most = length_of(sample.index or 0)
    return await generate(args, sample, {**sampling_params, "max_new_tokens": most, "ignore_eos": True})


def run(mode: str, folder: Path, num_steps: int) -> list[dict[str, float]]:
    """One run; its metrics, a dict per step."""
    script, flags = MODES[mode]
    command = [
        sys.executable, script, "--hf-checkpoint", folder / "model", "--prompt-data", folder / "digits.jsonl",
        "--input-key", "prompt", "--label-key", "label", "--apply-chat-template", "--run-dir", folder / mode,
        "--custom-rm-path", "recipes.tiny.tasks:digit_fraction", "--rollout-batch-size", PROMPTS,
        "--n-samples-per-prompt", SAMPLES, "--rollout-max-response-len", LONGEST, "--num-rollout", num_steps,
        "--custom-generate-function-path", "benchmarks.asynchronous:generate_heavy_tailed", "--no-bf16",
        "--lr", "1e-4", "--update-weight-transport", "tensor", "--use-dynamic-batch-size",
        "--max-tokens-per-gpu", "8192", *flags,
    ]  # fmt: skip
    with (folder / f"{mode}.log").open("w") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run([str(c) for c in command], cwd=ROOT, env=environment, stdout=log, stderr=log, check=True)
    steps: dict[int, dict[str, float]] = {}
    for line in (folder / mode / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for axis in ("rollout/step", "train/step"):
            if axis in row:
                steps.setdefault(int(row[axis]), {}).update(row)
    return [steps[step] for step in sorted(steps)]


def main() -> None:
    """Runs the modes one after the other and prints a line each."""
    from recipes.tiny.tasks import write_all
    from tests.support.tiny import write_tiny_model

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--keep", type=Path, default=None)
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="slime-async-"))
    write_all(folder)
    write_tiny_model(folder / "model", "qwen3")
    base = 0.0
    for mode in options.modes:
        steps = run(mode, folder, options.steps)[WARM_UP:]
        seconds = sum(step["perf/step_time"] for step in steps)
        samples = PROMPTS * SAMPLES * len(steps) / seconds
        tokens = sum(step["rollout/response_tokens"] for step in steps) / seconds
        oldest = max(step["rollout/staleness/max"] for step in steps)
        base = base or samples
        idle = sum(step.get("perf/rollout_idle_time", 0.0) for step in steps)
        pause = statistics.median(step.get("perf/update_weights_pause_time", 0.0) for step in steps)
        print(
            f"{mode:13} {samples:6.2f} samples/s ({samples / base:.2f}x) {tokens:7.0f} trained tokens/s, "
            f"oldest token {oldest:.0f} versions, idle {idle:.1f} s, paused {pause:.3f} s"
        )


if __name__ == "__main__":
    main()
