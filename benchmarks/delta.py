"""Size of deltas of real GRPO steps, compared with the changed fraction of the weights and its entropy.

    RUN_DIR=runs/delta bash recipes/demo/run.sh --bf16 --num-rollout 4 --update-weight-mode delta \\
        --update-weight-disk-dir runs/delta-versions --update-weight-local-checkpoint-dir runs/delta-local \\
        --update-weight-disk-keep-files
    python -m benchmarks.delta --versions runs/delta-versions --json benchmarks/results/delta.json

The first command trains SmolLM2-135M like the demo, with a weight sync after each step, and keeps the versions. The
second command reads the versions, and reconstructs the tensors before and after each delta. The bound is the sum over
tensors of two entropies, assuming independence: of the positions of changed elements (n times the binary entropy of the
tensor's density), and of their changes (the number of changed elements times the entropy of the distribution of their
XOR in that tensor, whose table is not counted). A code that knows more, such as the rows with changes, may be smaller.
`bytes` are all files of a version, including the manifest. `encode_s` covers all patches in one encoding.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from slime.weights.delta import encodings
from slime.weights.delta.folder import Base, Manifest, folder_of, places, version_of, width_of
from slime.weights.delta.local_checkpoint import LocalCheckpoint

Tensors = dict[str, tuple[np.ndarray, int]]
"""Name -> (bytes of the tensor, bytes per element)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--versions", type=Path, required=True, help="folder with the versions of a run")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    versions = sorted(v for path in options.versions.iterdir() if (v := version_of(path.name)) is not None)
    steps = measure(options.versions, versions)
    results = {"command": " ".join(sys.argv), "versions": len(versions), "cores": os.cpu_count(), "steps": steps}
    text = json.dumps(results, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


def measure(folder: Path, versions: list[int]) -> list[dict[str, Any]]:
    """Returns the results of each delta."""
    steps: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        local = LocalCheckpoint(Path(scratch), folder)
        before: Tensors = {}
        for version in versions:
            manifest = Manifest.read(folder / folder_of(version))
            local.bring_to(Base(version, manifest.digest))
            after = tensors_in(local.model)
            if manifest.base is not None:
                steps.append({"version": version, **figures(folder / folder_of(version), manifest, before, after)})
                print(json.dumps(steps[-1]), flush=True)
            before = after
    return steps


def tensors_in(model: Path) -> Tensors:
    """Returns copies of all tensors."""
    found: Tensors = {}
    for file in model.glob("*.safetensors"):
        data = np.fromfile(file, np.uint8)
        for name, place in places(file).items():
            found[name] = data[place.offset : place.offset + place.num_bytes].copy(), width_of(place.dtype)
    return found


def figures(folder: Path, manifest: Manifest, before: Tensors, after: Tensors) -> dict[str, Any]:
    """Returns the results of one delta."""
    total = changed = 0
    where = what = 0.0
    for name, (new, width) in after.items():
        moved = encodings.elements(before[name][0], width) ^ encodings.elements(new, width)
        symbols = moved[moved != 0]
        total, changed = total + len(moved), changed + len(symbols)
        where += len(moved) * entropy(np.array([len(symbols), len(moved) - len(symbols)])) / 8
        what += len(symbols) * entropy(np.unique(symbols, return_counts=True)[1]) / 8
    size = sum(file.stat().st_size for file in folder.iterdir())
    full = sum(len(data) for data, _ in after.values())
    return {
        "density": changed / total,
        "tensors_changed": len(manifest.entries),
        "tensors": len(after),
        "full_bytes": full,
        "bytes": size,
        "manifest_bytes": (folder / "manifest.json").stat().st_size,
        "share_of_full": size / full,
        "bound_bytes": round(where + what),
        "bound_positions_bytes": round(where),
        "bound_symbols_bytes": round(what),
        "times_bound": size / (where + what),
        **{f"{name}_patches": encoded(name, before, after) for name in encodings.ENCODINGS},
    }


def encoded(name: str, before: Tensors, after: Tensors) -> dict[str, float]:
    """Returns the bytes and seconds of all patches in an encoding."""
    began = time.perf_counter()
    size = sum(len(encodings.encode(name, before[n][0], new, width)[0]) for n, (new, width) in after.items())
    return {"bytes": size, "encode_s": round(time.perf_counter() - began, 3)}


def entropy(counts: np.ndarray) -> float:
    """Returns the bits per symbol of a distribution; 0 if it is empty."""
    counts = counts[counts > 0]
    return float(-(counts / counts.sum() * np.log2(counts / counts.sum())).sum()) if len(counts) else 0.0


if __name__ == "__main__":
    main()
