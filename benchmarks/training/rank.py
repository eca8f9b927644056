"""One rank of a measurement: `python -m benchmarks.training.rank SPEC.json RANK`, started by `benchmarks/train.py`.

Consumes: a spec, made by `benchmarks.train.combinations`. Produces: `result.json` next to it, written by rank 0 after
every length, so results before an error are kept; `error_RANK.json` if it fails. Waits for: the other ranks, in
collectives, with the limit of the process group.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.training import shapes
from benchmarks.training.tree import Tree, enter, num_parameters, random_weights

SEED = 1234
COMMON = (
    "--num-rollout 1 --rollout-batch-size 1 --rm-type math --advantage-estimator grpo --lr 1e-6 "
    "--use-dynamic-global-batch-size --use-dynamic-batch-size --logprob-gap-limit 1e9"
)
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def settings_of(tree: Tree, spec: dict[str, Any]) -> Any:
    """Parses settings as from a run's command line: GRPO, one optimizer step, dynamic batches."""
    folder = Path(spec["folder"])
    words = ["--hf-checkpoint", str(folder / "model"), "--prompt-data", str(folder / "prompts.jsonl")]
    words += ["--device", spec["device"], "--colocate", "--actor-num-gpus-per-node", str(spec["world_size"])]
    words += ["--n-samples-per-prompt", str(shapes.GROUP_SIZE)]
    words += ["--rollout-max-response-len", str(max(spec["mean_lengths"]))]
    words += ["--max-tokens-per-gpu", str(spec["max_tokens"])]
    words += [] if spec["device"] == "cuda" else ["--no-bf16"]
    further = " ".join([COMMON, RECOMPUTE if spec["recompute"] else "", spec["flags"]])
    return tree.parse_args([*words, *spec["layout_flags"], *shlex.split(further)])


class Rank:
    """A backend and its measurements."""

    def __init__(self, tree: Tree, spec: dict[str, Any], rank: int) -> None:
        self.tree, self.spec, self.rank = tree, spec, rank
        started = time.perf_counter()
        listener = socket.socket(fileno=spec["listener_fd"]) if rank == 0 else None
        with random_weights(SEED):
            self.backend = tree.backend(
                settings_of(tree, spec),
                rank=rank,
                world_size=spec["world_size"],
                local_rank=rank,
                master_address="127.0.0.1",
                master_port=spec["port"],
                listener=listener,
            )
        self.backend.weight_version = 1
        self.build_s = time.perf_counter() - started
        self._num_batches = 0

    def batch(self, num_samples: int, mean: int) -> Any:
        """Returns a new batch of that size, the same on every rank."""
        self._num_batches += 1
        fields = shapes.samples(
            num_samples,
            mean,
            longest=min(4 * mean, self.spec["max_tokens"] * self.backend.parallel_info.sizes.cp),
            vocab_size=self.spec["model"]["vocab_size"],
            version=self.backend.weight_version,
            seed=SEED + self._num_batches,
        )
        return self.tree.batch(fields)

    def run(self) -> dict[str, Any]:
        """Measures all lengths; rank 0 writes the result after each."""
        from benchmarks.training import measure

        device, spec = self.backend.device, self.spec
        result: dict[str, Any] = {
            "versions": measure.versions(device),
            "build_s": self.build_s,
            "parameters_of_rank": num_parameters(self.backend),
            "memory_after_build_gb": measure.largest(measure.over_ranks(measure.memory_gb(device))),
            "lengths": [],
        }
        for mean in spec["mean_lengths"]:
            result["lengths"].append({"mean_length": mean, **self._measure(mean, first=not result["lengths"])})
            if self.rank == 0:
                (Path(spec["folder"]) / "result.json").write_text(json.dumps(result))
        return result

    def _measure(self, mean: int, *, first: bool) -> dict[str, Any]:
        from benchmarks.training import measure
        from benchmarks.training.profile import profile

        device, spec, backend = self.backend.device, self.spec, self.backend
        num_samples = spec["samples"] or max(shapes.GROUP_SIZE, spec["tokens"] // mean)
        few = min(num_samples, spec["profile_samples"] or max(shapes.GROUP_SIZE, 4 * spec["max_tokens"] // mean))
        before = measure.matrix_tflops(device)
        measure.reset_peak(device)
        with measure.counted_passes(backend) as passes:  # a later length needs less than a whole batch to warm up
            warm_up = measure.timed_call(backend, self.batch(num_samples if first else few, mean))
        measured = [measure.timed_call(backend, self.batch(num_samples, mean)) for _ in range(spec["calls"])]
        memory = measure.largest(measure.over_ranks(measure.memory_gb(device)))
        after = measure.matrix_tflops(device)
        figures: dict[str, Any] = {
            "samples": num_samples,
            "warm_up": warm_up,
            "first_call_of_process": first,
            "passes_of_warm_up": passes,
            "calls": measured,
            **measure.summary(measured, [before["tflops"], after["tflops"]], device),
            "matrix": {"before": before, "after": after},
            "memory_gb": memory,
        }
        if spec["profile"]:
            name = f"{spec['name']}-{mean}"
            folder = Path(spec["profile"]) if self.rank == 0 else None
            figures["profile"] = {"samples": few, **profile(backend, lambda: self.batch(few, mean), folder, name)}
        return figures


def main() -> None:
    """Entry point."""
    spec: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    rank, folder = int(sys.argv[2]), Path(spec["folder"])
    if spec["device"] == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        ranked = Rank(enter(Path(spec["tree"])), spec, rank)
        ranked.run()
        ranked.backend.close()
    except Exception as error:
        (folder / f"error_{rank}.json").write_text(json.dumps(f"{type(error).__name__}: {str(error)[:600]}"))
        raise


if __name__ == "__main__":
    main()
