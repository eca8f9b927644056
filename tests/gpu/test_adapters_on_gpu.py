"""Adapters and other policies on a GPU: pinned host memory, sleep and wake, one GPU against a CPU.

python -m pytest tests/gpu/test_adapters_on_gpu.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.ranks import Ranks
from tests.support.tiny import write_tiny_model
from tests.support.training import free_port, random_batch, training_args
from tests.support.training_ranks import run_layouts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _backend(checkpoint: Path, **settings: Any) -> Any:
    from tests.support.measured_backend import MeasuredBackend

    args = training_args(checkpoint, **settings)
    return MeasuredBackend(
        args, rank=0, world_size=1, local_rank=0, master_address="127.0.0.1", master_port=free_port()
    )


@pytest.mark.parametrize("settings", [{"lora_rank": 4}, {"freeze_params_name_list": ("embed",)}], ids=str)
def test_other_policies_are_lent_and_given_back(settings: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = write_tiny_model(tmp_path / "model", "qwen3", tied=False, head_dim=64)
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_load": str(checkpoint), "ref_update_interval": 1}
    backend = _backend(checkpoint, device="cuda", keep_old_actor=True, **kl, **settings)
    batch = random_batch()
    start = backend.log_probs(batch)
    for version in (1, 2):
        backend.weight_version = version
        backend.note_synced()
        backend.train(batch)
    before = {name: p.detach().clone() for name, p in backend.model.shards.items()}
    after = backend.log_probs(batch)
    assert max(np.abs(a - b).max() for a, b in zip(start, after, strict=True)) > 1e-3, "nothing was trained"
    reference = backend._others.log_probs("reference", backend._context, backend._prepare(batch))
    assert all(np.array_equal(a, b) for a, b in zip(reference, after, strict=True)), "the policy became the reference"
    backend.sleep()
    backend.wake()
    assert all(torch.equal(p, before[name]) for name, p in backend.model.shards.items())
    assert all(p.is_pinned() for p in backend._others._host._policies["reference"].values())
    backend.close()


def test_a_gpu_computes_what_a_cpu_does(tmp_path: Path) -> None:
    checkpoint = write_tiny_model(tmp_path / "model", "qwen3", tied=False, head_dim=64)
    found = {}
    for device in ("cpu", "cuda"):  # in processes of their own: a CPU patches Megatron
        layout = {"one": {"world_size": 1, "megatron": {}, "args": {"device": device, "lora_rank": 4}}}
        defaults = {"checkpoint": str(checkpoint), "scenarios": {"packed": {}}, "rounds": 2}
        with Ranks(fresh=True) as ranks:
            found[device] = run_layouts(ranks, tmp_path / device, layout, defaults=defaults)["one"]
    want, got = found["cpu"], found["cuda"]
    for a, b in zip(want.result["log_probs"], got.result["log_probs"], strict=True):
        assert b == pytest.approx(a, abs=1e-4)
    for name, gradient in want.gradients["packed"].items():
        error = float((got.gradients["packed"][name] - gradient).abs().max() / gradient.abs().max())
        assert error < 1e-3, f"{name} differs by {error:.1e}"
