"""Weight gradients that are added inside the matrix product are those that autograd delivers, whatever is trained.

On a CPU the trainer never does it; the protocol with Megatron's layers, hooks and marks is the same, and here it runs
in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.compat import megatron_gradients
from tests.support.tiny import write_tiny_model
from tests.support.training import random_batch

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "untied": ({}, {}),
    "tied": ({"tied": True}, {}),
    "reductions overlap": ({"tied": True}, {"megatron": {"overlap_grad_reduce": True}}),
    "recomputed": (
        {},
        {"megatron": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}},
    ),
    "experts": ({"family": "qwen3_moe"}, {"megatron": {"overlap_grad_reduce": True}}),
    "frozen": ({}, {"freeze_params_name_list": ("embed_tokens", r"layers\.0\.")}),
    "adapters": ({"tied": True}, {"lora_rank": 2}),
    "critic": ({}, {"advantage_estimator": "ppo", "critic_lr": 1e-3}),
}

FAST = ("tied",)


def _force(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_a_cpu(device: torch.device) -> list[Any]:
        megatron_gradients.install(device)
        return [megatron_gradients._report(took_effect=True)]

    monkeypatch.setattr(megatron_gradients, "activate_weights", on_a_cpu)


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in FAST else pytest.mark.slow) for c in CASES])
def test_gradients_and_steps_are_those_of_autograd(
    case: str, tmp_path: Path, make_backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, settings = CASES[case]
    model = write_tiny_model(tmp_path / "model", **shape)
    if case == "critic":
        settings = {**settings, "critic_load": str(model)}
    found = []
    for fused in (False, True):
        if fused:
            _force(monkeypatch)
        backend = make_backend(model, **settings)
        assert backend._trainable.chunks[0].config.gradient_accumulation_fusion == fused
        gradients = {name: x.clone() for name, x in backend.gradients(random_batch()).items()}
        metrics = [backend.train(random_batch(seed=s)) for s in (1, 2)]
        found.append((gradients, metrics))
    (plain, first), (fused_, second) = found
    assert plain.keys() == fused_.keys()
    for name, want in plain.items():
        torch.testing.assert_close(fused_[name], want, rtol=1e-4, atol=1e-6 * float(want.abs().max()) + 1e-9, msg=name)
    for one, other in zip(first, second, strict=True):
        for name in (name for name in one if "grad_norm" in name or name == "train/loss"):
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name
