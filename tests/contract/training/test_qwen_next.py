"""Qwen3-Next and Qwen3.5: the Megatron model is the Hugging Face model, in packed rows and under every cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from slime.core.batch import TrainBatch
from tests.support.experts import by_checkpoint_name
from tests.support.qwen_next import write_qwen_next
from tests.support.training import random_batch

TOLERANCE = 3e-5
"""Of gradients, relative to the largest entry of each tensor, float32."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_5_tied": ("qwen3_5", {"tied": True}),
    "qwen3_5_moe": ("qwen3_5_moe", {}),
}


def _load(checkpoint: Path, family: str) -> Any:
    kind = transformers.AutoModelForCausalLM if family == "qwen3_next" else transformers.AutoModelForImageTextToText
    return kind.from_pretrained(checkpoint, dtype=torch.float32)


def _log_probs(model: Any, batch: TrainBatch) -> list[torch.Tensor]:
    out = []
    for sample in batch.samples:
        tokens = torch.from_numpy(sample.tokens)
        first = sample.num_tokens - sample.response_length
        log_probs = torch.log_softmax(model(tokens[None]).logits[0].float(), -1)
        out.append(log_probs[first - 1 : -1].gather(1, tokens[first:, None]).squeeze(1))
    return out


def _gradients(model: Any, family: str) -> dict[str, torch.Tensor]:
    named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return by_checkpoint_name(named.items()) if family == "qwen3_next" else named


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_and_gradient_equal_transformers(name: str, tmp_path: Path, make_backend: Callable[..., Any]) -> None:
    family, options = MODELS[name]
    checkpoint = write_qwen_next(tmp_path / name, family, **options)
    batch = random_batch(seed=3)
    backend = make_backend(checkpoint, loss_type="sft_loss", calculate_per_token_loss=True, micro_batch_size=3)
    model = _load(checkpoint, family)
    want = _log_probs(model, batch)
    for got, reference in zip(backend.log_probs(batch), want, strict=True):
        assert np.abs(got - reference.detach().numpy()).max() < 1e-5, "log-probs differ from transformers'"

    masks = [torch.from_numpy(s.loss_mask) for s in batch.samples]
    loss = -sum((lp * m).sum() for lp, m in zip(want, masks, strict=True)) / sum(m.sum() for m in masks)
    loss.backward()
    gradients = backend.gradients(batch)
    named = _gradients(model, family)
    assert gradients.keys() == named.keys(), gradients.keys() ^ named.keys()
    for parameter, gradient in gradients.items():
        exact = named[parameter]
        error = float((gradient - exact).abs().max() / exact.abs().max().clamp_min(1e-3))
        assert error < TOLERANCE, f"gradient of {parameter} differs by {error:.1e} of its largest entry"
