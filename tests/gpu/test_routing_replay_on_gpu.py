"""Replayed experts on a GPU: the same gradients as on a CPU, in float32; in bfloat16 the same experts.

python -m pytest tests/gpu/test_routing_replay_on_gpu.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime.models.common.mlp import RowRouting
from tests.gpu.conftest import Figure
from tests.support.tiny import write_tiny_model
from tests.support.training_ranks import run_on_cpu_and_gpu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LAYERS, EXPERTS, TOPK = 2, 8, 2
REPLAY = {"use_rollout_routing_replay": True, "use_routing_replay": True}


def _on(device: str, **megatron: Any) -> dict[str, Any]:
    return {"args": {"device": device, **REPLAY}, "routed": (LAYERS, EXPERTS, TOPK), "megatron": megatron}


def test_replayed_experts_are_those_of_a_cpu(tmp_path: Path, figure: Figure) -> None:
    """The record is at random, and has holes: another token's experts would show in log-probs and gradients."""
    checkpoint = write_tiny_model(
        tmp_path / "model", "qwen3_moe", head_dim=64, num_experts=EXPERTS, num_experts_per_tok=TOPK
    )
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    devices = {
        "cpu": _on("cpu"),
        "gpu": _on("cuda", **again),
        "half_cpu": _on("cpu", bf16=True),
        "half_gpu": _on("cuda", bf16=True),
    }
    far = run_on_cpu_and_gpu(tmp_path, checkpoint, devices, figure)
    cpu, gpu = far["half_cpu"], far["half_gpu"]
    assert gpu < 2 * cpu + 1e-3, f"bfloat16 on a GPU is off by {gpu:.1e} on average, on a CPU by {cpu:.1e}"


@pytest.mark.parametrize(("tokens", "topk", "experts"), [(0, 2, 8), (1, 2, 8), (50_000, 8, 128), (4_097, 8, 256)])
@pytest.mark.parametrize("replays", [True, False])
def test_a_choice_is_exact_and_counted(tokens: int, topk: int, experts: int, replays: bool) -> None:
    kind = torch.uint8 if experts < 255 else torch.int16
    generator = torch.Generator().manual_seed(1)
    given, own = (torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :topk] for _ in range(2))
    given[::5] = torch.iinfo(kind).max
    given[1::5] = own[1::5].flip(-1)
    found = {}
    for device in ("cpu", "cuda"):
        counts = torch.zeros(2, dtype=torch.float64, device=device)
        row = RowRouting({0: given.to(kind).to(device)}, replays, {}, counts)
        choice = row.choose(0, own.to(device), experts)
        assert row.keeps is not None and torch.equal(row.keeps[0].long(), choice)
        found[device] = choice.cpu(), counts.cpu()
    assert torch.equal(found["cpu"][0], found["cuda"][0]) and torch.equal(found["cpu"][1], found["cuda"][1])
    assert torch.equal(found["cuda"][0][::5], own[::5])
