"""Multimodal Qwen3.5, trained on text: the language model is transformers', the vision tower is carried along.

What is beyond the matrix of `test_families`: names under `model.language_model`, a tied output layer, experts that the
files stack in one tensor, tensor parallelism without sequence parallelism, and the norm of the gradient.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.support.qwen_next import write_qwen_next
from tests.support.ranks import Ranks
from tests.support.training import random_batch
from tests.support.training_ranks import Outcome, run_layouts

pytestmark = pytest.mark.slow
TOLERANCE = 3e-5
"""Of gradients, relative to the largest entry of each tensor, float32."""
TP = {"tensor_model_parallel_size": 2}
LAYOUTS: dict[str, dict[str, tuple[int, dict[str, Any]]]] = {
    "qwen3_5": {"tp2": (2, TP)},
    "qwen3_5_moe": {
        "sp2ep2": (
            2,
            {**TP, "sequence_parallel": True, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"},
        )
    },
}
BATCH_SEED = 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> tuple[Path, dict[str, Outcome]]:
    root = tmp_path_factory.mktemp("qwen_next")
    specs = {}
    for family, layouts in LAYOUTS.items():
        checkpoint = write_qwen_next(root / family, family, tied=family == "qwen3_5")
        for name, (world_size, megatron) in layouts.items():
            own = {"world_size": world_size, "megatron": megatron, "checkpoint": str(checkpoint)}
            specs[f"{family}-{name}"] = own
    defaults = {
        "scenarios": {"loss": {}},
        "args": {"loss_type": "sft_loss", "calculate_per_token_loss": True, "micro_batch_size": 3},
        "seed": BATCH_SEED,
        "provoke": False,
        "export": True,
        "rounds": 1,
    }
    return root, run_layouts(ranks, root / "runs", specs, defaults=defaults)


def _reference(checkpoint: Path) -> tuple[list[np.ndarray], dict[str, torch.Tensor]]:
    """Log-probs of each sample, and gradients, from transformers' class for images and text."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    samples, log_probs = random_batch(seed=BATCH_SEED).samples, []
    for sample in samples:
        tokens = torch.from_numpy(sample.tokens).long()
        first = sample.num_tokens - sample.response_length
        every = torch.log_softmax(model(tokens[None]).logits[0].float(), -1)
        log_probs.append(every[first - 1 : -1].gather(1, tokens[first:, None]).squeeze(1))
    masks = [torch.from_numpy(s.loss_mask) for s in samples]
    loss = -sum((lp * m).sum() for lp, m in zip(log_probs, masks, strict=True)) / sum(m.sum() for m in masks)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [lp.detach().numpy() for lp in log_probs], gradients


@pytest.mark.parametrize("family", LAYOUTS)
def test_the_language_model_is_that_of_transformers(runs: tuple[Path, dict[str, Outcome]], family: str) -> None:
    root, outcomes = runs
    log_probs, gradients = _reference(root / family)
    norm = float(torch.sqrt(sum(g.square().sum() for g in gradients.values())))
    for name in LAYOUTS[family]:
        outcome = outcomes[f"{family}-{name}"]
        for got, want in zip(outcome.result["log_probs"], log_probs, strict=True):
            assert np.abs(np.asarray(got) - want).max() < 1e-5, f"{name}: log-probs differ from transformers'"
        own = outcome.gradients["loss"]
        assert own.keys() == gradients.keys(), f"{name}: {own.keys() ^ gradients.keys()}"
        for tensor, want in gradients.items():
            error = float((own[tensor] - want).abs().max() / want.abs().max().clamp_min(1e-3))
            assert error < TOLERANCE, f"{name}: gradient of {tensor} differs by {error:.1e} of its largest entry"
        assert outcome.result["metrics"][0]["train/grad_norm"] == pytest.approx(norm, rel=1e-5), name


@pytest.mark.parametrize("family", LAYOUTS)
def test_files_come_back_bit_for_bit_with_the_vision_tower(runs: tuple[Path, dict[str, Outcome]], family: str) -> None:
    root, _ = runs
    source = load_file(root / family / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in source), "nothing to carry along"
    for name in LAYOUTS[family]:
        written = load_file(root / "runs" / f"{family}-{name}" / "hf" / "model.safetensors")
        assert written.keys() == source.keys(), name
        for tensor, want in source.items():
            assert torch.equal(written[tensor], want), f"{name}: {tensor}"
