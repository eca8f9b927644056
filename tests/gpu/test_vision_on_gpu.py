"""Images on a GPU: the same log-probs and gradients as on a CPU, in float32; in bfloat16 as far off as on a CPU.

python -m pytest tests/gpu/test_vision_on_gpu.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.conftest import Figure
from tests.support.training_ranks import run_on_cpu_and_gpu
from tests.support.vision import write_vision_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [12, 10, 10], "mrope_interleaved": True}


def _on(device: str, folder: Path, **megatron: Any) -> dict[str, Any]:
    settings = {"device": device, "multimodal_keys": {"image": "images"}, "run_dir": str(folder)}
    return {"args": settings, "seeing": str(folder / "images"), "megatron": megatron}


def test_what_is_seen_on_a_gpu_is_what_is_seen_on_a_cpu(tmp_path: Path, figure: Figure) -> None:
    checkpoint = write_vision_model(tmp_path / "model", head_dim=64, rope_parameters=ROPE)
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    devices = {
        "cpu": _on("cpu", tmp_path),
        "gpu": _on("cuda", tmp_path, **again),
        "half_cpu": _on("cpu", tmp_path, bf16=True),
        "half_gpu": _on("cuda", tmp_path, bf16=True),
    }
    far = run_on_cpu_and_gpu(tmp_path, checkpoint, devices, figure)
    cpu, gpu = far["half_cpu"], far["half_gpu"]
    assert gpu < 2 * cpu + 1e-3, f"bfloat16 on a GPU is off by {gpu:.1e} on average, on a CPU by {cpu:.1e}"
