"""Latent attention on a GPU, with values narrower than keys and with an indexer: against a CPU, float32 and bfloat16.

python -m pytest tests/gpu/test_latent_families_on_gpu.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.conftest import Figure
from tests.support.families import write_family
from tests.support.training_ranks import run_on_cpu_and_gpu

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
    [
        ("deepseek_v3", {}),
        ("glm4_moe_lite", {}),
        ("deepseek_v32", {"index_n_heads": 8, "index_head_dim": 64}),
        ("glm_moe_dsa", {"index_n_heads": 8, "index_head_dim": 64}),
    ],
)
def test_a_trainer_on_a_gpu_is_that_on_a_cpu(
    tmp_path: Path, family: str, changes: dict[str, Any], figure: Figure
) -> None:
    checkpoint = write_family(tmp_path / "model", family, **{**WIDE, **changes})
    far = run_on_cpu_and_gpu(tmp_path, checkpoint, DEVICES, figure)
    cpu, gpu = far["half_cpu"], far["half_gpu"]
    assert gpu < 2 * cpu + 1e-3, f"bfloat16 on a GPU is off by {gpu:.1e} on average, on a CPU by {cpu:.1e}"
