"""Latent attention on a GPU, with values narrower than keys and with an indexer: against a CPU, float32 and bfloat16.

python -m pytest tests/gpu/test_latent_families_on_gpu.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.families import write_family
from tests.support.training_ranks import run_layouts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WIDE: dict[str, Any] = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 48}
"""Head sizes that kernels of GPUs take."""
DEVICES: dict[str, dict[str, Any]] = {
    "cpu": {"args": {"device": "cpu"}},
    "gpu": {"args": {"device": "cuda"}},
    "half_cpu": {"args": {"device": "cpu"}, "megatron": {"bf16": True}},
    "half_gpu": {"args": {"device": "cuda"}, "megatron": {"bf16": True}},
}


@pytest.mark.parametrize(
    ("family", "changes"),
    [("deepseek_v3", {}), ("glm4_moe_lite", {}), ("glm_moe_dsa", {"index_n_heads": 8, "index_head_dim": 64})],
)
def test_a_trainer_on_a_gpu_is_that_on_a_cpu(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    checkpoint = write_family(tmp_path / "model", family, **{**WIDE, **changes})
    layouts = {name: {"world_size": 1, "megatron": {}, **device} for name, device in DEVICES.items()}
    defaults = {"checkpoint": str(checkpoint), "scenarios": {"four": {}}, "rounds": 1, "provoke": False}
    outcomes = {}
    for kind in ("cpu", "cuda"):  # in processes of their own: what helps Megatron on a CPU stays for a process's life
        own = {name: layout for name, layout in layouts.items() if layout["args"]["device"] == kind}
        outcomes |= run_layouts(tmp_path / kind, own, defaults=defaults)
    for tensor, want in outcomes["cpu"].gradients["four"].items():
        error = float((outcomes["gpu"].gradients["four"][tensor] - want).abs().max() / want.abs().max().clamp_min(1e-6))
        assert error < 1e-3, f"gradient of {tensor} differs by {error:.1e} of its largest entry"
    log_probs = {name: np.concatenate(outcome.result["log_probs"]) for name, outcome in outcomes.items()}
    assert np.abs(log_probs["gpu"] - log_probs["cpu"]).max() < 1e-4, "float32 log-probs of GPU and CPU differ"
    cpu, gpu = (np.abs(log_probs[name] - log_probs["cpu"]).mean() for name in ("half_cpu", "half_gpu"))
    assert gpu < 2 * cpu + 1e-3, f"bfloat16 on a GPU is off by {gpu:.1e} on average, on a CPU by {cpu:.1e}"
