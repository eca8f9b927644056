"""The family is found by its `model_type`: architecture, weight map, and log-probs of the trainer's model on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from slime.core.hf_config import read_hf_config
from slime.models import architecture, table_for
from slime.settings import parse_args
from tests.support.command_line import complete
from tests.support.engine_parity import one_rank
from tests.support.tiny import write_tiny_model
from tests.support.training import random_batch

folder = Path(sys.argv[1])


def tiny(name: str, model_type: str) -> Path:
    """The same random weights, under a `model_type`."""
    path = write_tiny_model(folder / name, "qwen3")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    return path


toy, qwen3 = tiny("as_toy", "toy"), tiny("as_qwen3", "qwen3")
config = read_hf_config(str(toy))
assert architecture(config)["qk_layernorm"] is True
assert "model.layers.1.self_attn.q_norm.weight" in set(table_for(config).hf_names)
assert parse_args([*complete(folder), "--hf-checkpoint", str(toy)]).megatron["num_layers"] == 2


def log_probs(path: Path) -> list[Any]:
    """Of the trainer's own model."""
    with one_rank(path) as backend:
        return list(backend.log_probs(random_batch()))


for ours, known in zip(log_probs(toy), log_probs(qwen3), strict=True):
    np.testing.assert_array_equal(ours, known)
