"""`--optimizer muon`: steps are those of torch's own Muon and AdamW, on any number of ranks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.core.errors import CheckpointError
from tests.support.families import write_family
from tests.support.marks import quick
from tests.support.ranks import Ranks
from tests.support.tiny import write_tiny_model
from tests.support.training import MUON, random_batch
from tests.support.training_ranks import run_layouts

STEPS, RATE, WEIGHT_DECAY, CLIP, EPS, BETAS, MOMENTUM = 4, 0.02, 0.3, 0.5, 0.1, (0.9, 0.95), 0.8
SETTINGS: dict[str, Any] = {
    **MUON,
    "muon_coefficient_type": "simple",
    "muon_momentum": MOMENTUM,
    "lr": RATE,
    "start_weight_decay": WEIGHT_DECAY,
    "end_weight_decay": WEIGHT_DECAY,
    "weight_decay": WEIGHT_DECAY,
    "adam_eps": EPS,
    "adam_beta1": BETAS[0],
    "adam_beta2": BETAS[1],
    "clip_grad": CLIP,
}
RMS: dict[str, Any] = {"muon_scale_mode": "spectral", "muon_extra_scale_factor": 0.2}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3": ("qwen3", {**RMS, "muon_nesterov": True}, {"adjust_lr_fn": "match_rms_adamw", "nesterov": True}),
    "experts": (
        "qwen3_moe",
        {"muon_scale_mode": "shape_scaling", "muon_split_qkv": False, "muon_num_ns_steps": 3},
        {"adjust_lr_fn": "original", "nesterov": False, "ns_steps": 3},
    ),
    "bfloat16 products": (
        "qwen3",
        {**RMS, "muon_fp32_matmul_prec": "medium"},
        {"adjust_lr_fn": "match_rms_adamw", "nesterov": False},
    ),
}
"""Family, our settings, those of torch.optim.Muon."""


def _matrices(names: Iterable[str], *, split_qkv: bool) -> list[list[str]]:
    """HF names of the tensors that Muon updates as one matrix."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        if ".layers." in name and "norm" not in name:
            name_of_matrix = re.sub(r"\.(gate|up)_proj", ".gate_up_proj", name)
            found[name_of_matrix if split_qkv else re.sub(r"\.[qkv]_proj", ".qkv_proj", name_of_matrix)].append(name)
    return list(found.values())


class _Torch:
    """The steps of torch alone, on copies of the weights by HF name."""

    def __init__(self, weights: dict[str, Tensor], *, split_qkv: bool, **muon: Any) -> None:
        self._rows = {name: tensor.size(0) for name, tensor in weights.items()}
        self._groups = _matrices(weights, split_qkv=split_qkv)
        self._matrices = [torch.cat([weights[n] for n in names]) for names in self._groups]
        updated = {name for names in self._groups for name in names}
        self._rest = {name: tensor.clone() for name, tensor in weights.items() if name not in updated}
        self._optimizers = [
            torch.optim.Muon(self._matrices, RATE, WEIGHT_DECAY, MOMENTUM, **muon),
            torch.optim.AdamW(
                [
                    {"params": [p for p in self._rest.values() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
                    {"params": [p for p in self._rest.values() if p.ndim == 1], "weight_decay": 0.0},
                ],
                lr=RATE,
                betas=BETAS,
                eps=EPS,
            ),
        ]

    def step(self, gradients: dict[str, Tensor]) -> None:
        for names, matrix in zip(self._groups, self._matrices, strict=True):
            matrix.grad = torch.cat([gradients[n] for n in names])
        for name, tensor in self._rest.items():
            tensor.grad = gradients[name].clone()
        torch.nn.utils.clip_grad_norm_([*self._matrices, *self._rest.values()], CLIP)
        for one in self._optimizers:
            one.step()

    def weights(self) -> dict[str, Tensor]:
        out = dict(self._rest)
        for names, matrix in zip(self._groups, self._matrices, strict=True):
            out |= zip(names, matrix.split([self._rows[name] for name in names]), strict=True)
        return out


def _weights(backend: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in backend.iter_hf_tensors()}


@pytest.mark.parametrize("case", quick(CASES, "qwen3"))
def test_weights_are_those_of_torch(
    case: str, tmp_path: Path, make_backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: matrices of layers by Muon, one for each expert and router; embedding, output layer and norms by AdamW."""
    family, settings, of_torch = CASES[case]
    exact = "muon_fp32_matmul_prec" not in settings
    backend = make_backend(write_tiny_model(tmp_path / "model", family, tied=False), megatron={**SETTINGS, **settings})
    start = _weights(backend)
    reference = _Torch(start, split_qkv=settings.get("muon_split_qkv", True), **of_torch)
    for step in range(STEPS):
        batch = random_batch(seed=step)
        gradients = backend.gradients(batch)
        with monkeypatch.context() as float32:
            if exact:  # torch's Muon multiplies in bfloat16
                float32.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
            reference.step(gradients)
        backend.train(batch)
    got = _weights(backend)
    for name, tensor in reference.weights().items():
        moved, off = float((tensor - start[name]).norm()), float((got[name] - tensor).norm())
        assert moved > 0.0, f"{name} has not moved: nothing is compared"
        if exact:
            assert off <= min(1e-6 * float(tensor.norm()), 1e-3 * moved), f"{name}: {off / moved:.1e} of its way"
        else:  # torch rounds to bfloat16 before it normalises a matrix, and we after it
            assert off <= 0.05 * moved, f"{name} is off by {off / moved:.1e} of its way"


def test_resume_and_sleep_change_no_bit(tiny_qwen3: Path, tmp_path: Path, make_backend: Callable[..., Any]) -> None:
    megatron = {**MUON, "bf16": True}
    whole = make_backend(tiny_qwen3, megatron=megatron)
    whole.train(random_batch(seed=0))
    whole.save(tmp_path / "mid")
    whole.sleep()
    whole.wake()
    want = whole.train(random_batch(seed=1)), _weights(whole)
    resumed = make_backend(tiny_qwen3, megatron=megatron)
    resumed.load(tmp_path / "mid")
    assert resumed.train(random_batch(seed=1)) == want[0]
    assert all(torch.equal(tensor, want[1][name]) for name, tensor in _weights(resumed).items())


def test_a_checkpoint_of_the_other_optimizer_is_refused(
    tiny_qwen3: Path, tmp_path: Path, make_backend: Callable[..., Any]
) -> None:
    for first, second in (({}, MUON), (MUON, {})):
        folder = tmp_path / first.get("optimizer", "adam")
        backend = make_backend(tiny_qwen3, megatron=first)
        backend.train(random_batch())
        backend.save(folder)
        backend = make_backend(tiny_qwen3, megatron=second)
        with pytest.raises(CheckpointError, match="another --optimizer"):
            backend.load(folder)


TP: dict[str, Any] = {"tensor_model_parallel_size": 2}
SP: dict[str, Any] = {**TP, "sequence_parallel": True}
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3": {
        "dp2": {"overlap_grad_reduce": True, "bucket_size": 5000},
        "tp2": TP,
        "tp2 together": {**TP, "muon_tp_mode": "distributed"},
        "pp2": {"pipeline_model_parallel_size": 2},
        "cp2": {"context_parallel_size": 2},
    },
    "qwen3_moe": {
        "dp2": {},
        "ep2": {"expert_model_parallel_size": 2},
        "sp2": SP,
    },
    "qwen3_next": {"sp2": SP},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", LAYOUTS)
def test_two_ranks_make_the_steps_of_one(family: str, tmp_path: Path, ranks: Ranks) -> None:
    layouts = {name: {"world_size": 2, "megatron": {**MUON, **own}} for name, own in LAYOUTS[family].items()}
    layouts = {"one": {"world_size": 1, "megatron": MUON}, **layouts}
    model = write_family(tmp_path / "model", family)
    outcomes = run_layouts(
        ranks, tmp_path / "run", layouts, defaults={"checkpoint": str(model), "rounds": 3, "provoke": False}
    )
    want = outcomes.pop("one")
    for layout, got in outcomes.items():
        for one, other in zip(want.result["metrics"], got.result["metrics"], strict=True):
            assert other["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=1e-5), layout
        for name, tensor in want.weights.items():
            assert float((got.weights[name] - tensor).norm()) <= 1e-5 * float(tensor.norm()), f"{layout} {name}"


@pytest.mark.slow
def test_another_layout_resumes(tmp_path: Path, ranks: Ranks) -> None:
    """Law: momenta go to the ranks that need them, of whatever layout."""
    model = write_family(tmp_path / "model", "qwen3")
    defaults = {"checkpoint": str(model), "world_size": 2, "provoke": False}
    saved = {"tp2": {"megatron": {**MUON, **TP}, "rounds": 2, "save_after": 1}}
    want = run_layouts(ranks, tmp_path / "run", saved, defaults=defaults)["tp2"]
    load = str(tmp_path / "run" / "tp2" / "after_1")
    others = {"dp2": {}, "pp2": {"pipeline_model_parallel_size": 2}}
    layouts = {name: {"megatron": {**MUON, **own}, "rounds": 1, "load": load} for name, own in others.items()}
    for layout, got in run_layouts(ranks, tmp_path / "run", layouts, defaults=defaults).items():
        for name, tensor in want.weights.items():
            assert float((got.weights[name] - tensor).norm()) <= 1e-5 * float(tensor.norm()), f"{layout} {name}"
