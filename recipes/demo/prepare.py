"""Prepares the demo: `python -m recipes.demo.prepare --out assets/demo --seed 0`. A second call does nothing.

The held-out file depends on this seed. To compare runs with several seeds on the same held-out problems, use the same
`--out` and vary only `--seed` of train.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from . import task
from .model import unpack

STAMP = "task.json"


def prepare(out: Path, model: Path, *, seed: int = 0, dtype: str = "float32") -> None:
    """Creates the model and the data if they are missing or were created with different settings."""
    print(f"model: {unpack(model, dtype=dtype)}")
    stamp, wanted = (
        out / STAMP,
        {
            "task": task.TASK,
            "settings": task.SETTINGS,
            "num_held_out": task.NUM_HELD_OUT,
            "seed": seed,
        },
    )
    if not stamp.is_file() or json.loads(stamp.read_text()) != wanted:
        task.write_task(out, seed=seed)
        stamp.write_text(json.dumps(wanted))
    for name in ("train", "eval"):
        path = out / f"{name}.jsonl"
        print(f"{name}: {path} ({sum(1 for _ in path.open())} problems)")


def main(argv: list[str] | None = None) -> int:
    """Runs `python -m recipes.demo.prepare`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("assets/demo"), help="folder of train.jsonl and eval.jsonl")
    parser.add_argument("--model", type=Path, default=Path("assets/smollm2-135m-instruct"), help="folder of the model")
    parser.add_argument("--seed", type=int, default=0, help="selects the problems, and which problems are held out")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the weights")
    options = parser.parse_args(argv)
    prepare(options.out, options.model, seed=options.seed, dtype=options.dtype)
    return 0


if __name__ == "__main__":
    sys.exit(main())
