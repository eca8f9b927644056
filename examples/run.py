"""Runs an example on this machine: `python -m examples.run agent_search`. Additional flags are passed to train.py.

This script writes the example's `rows()` as a dataset, unpacks the demo model (SmolLM2-135M-Instruct) and starts
train.py. The demo model was never trained to call tools, so `tools.jinja` explains how. To use a different model, set
`--hf-checkpoint DIR`.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from recipes.demo.model import unpack
from recipes.demo.task import write_jsonl

ROOT = Path(__file__).parents[1]
FLAGS = """
    --colocate --device auto --input-key prompt --label-key label --num-rollout 2 --rollout-batch-size 4
    --n-samples-per-prompt 4 --rollout-max-response-len 64 --lr 1e-5 --lr-decay-style constant --no-bf16
"""


def main(name: str, flags: list[str]) -> None:
    """Replaces this process with the run of one example. The user's flags take precedence."""
    example = importlib.import_module(f"examples.{name}")
    data = ROOT / "assets" / "examples" / f"{name}.jsonl"
    data.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(data, example.rows())
    if "--hf-checkpoint" not in flags:
        model = unpack(ROOT / "assets" / "smollm2-135m-instruct")
        flags = ["--hf-checkpoint", str(model), "--chat-template", "examples/tools.jinja", "--override", *flags]
    own = ["--override", *example.FLAGS.split(), "--prompt-data", str(data)]
    command = ["train.py", *FLAGS.split(), *own, "--override", *flags]
    os.chdir(ROOT)
    os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(f"usage: python -m examples.run NAME [FLAG ...]\n\n{__doc__}")
    main(sys.argv[1], sys.argv[2:])
