"""The estimator is chosen on the command line, with a setting of its own, and trains a step of the Megatron backend."""

from __future__ import annotations

import contextlib
import math
import sys
from pathlib import Path

import pytest

from slime.core.errors import ConfigError
from slime.settings import parse_args
from slime.training.backend import MegatronBackend
from slime.training.parallel import destroy_process_groups
from tests.support.command_line import complete
from tests.support.tiny import write_tiny_model
from tests.support.training import free_port, random_batch

folder = Path(sys.argv[1])
words = [*complete(folder), "--hf-checkpoint", str(write_tiny_model(folder / "tiny", "qwen3"))]
words += ["--device", "cpu", "--no-bf16", "--micro-batch-size", "2", "--mismatch-limit", "1e9"]
words += ["--advantage-estimator", "median"]

with pytest.raises(ConfigError, match="median-scale"):
    parse_args([*words, "--median-scale", "0"])

norms = []
for scale in ("1", "2"):
    args = parse_args([*words, "--median-scale", scale])
    backend = MegatronBackend(
        args, rank=0, world_size=1, local_rank=0, master_address="127.0.0.1", master_port=free_port()
    )
    with contextlib.closing(backend):
        backend.weight_version = 1
        metrics = backend.train(random_batch())
        norms.append(metrics["train/grad_norm"])
    destroy_process_groups()
assert math.isclose(norms[1], 2 * norms[0], rel_tol=1e-4), f"the setting acts: {norms}"
assert norms[0] > 1e-3, norms
