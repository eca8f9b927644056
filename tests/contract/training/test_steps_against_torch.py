"""Optimizer steps are those of `torch.optim.AdamW` on transformers' own model: clip, schedule, weight decay, fresh
gradients in every step, several steps per batch.

The epsilon is large, so that a step depends on the size of a gradient and not on its sign alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from slime.core.batch import TrainBatch, TrainSample
from tests.support.experts import by_checkpoint_name
from tests.support.tiny import write_tiny_model
from tests.support.training import random_batch

BATCHES, STEPS_PER_BATCH = 3, 2
RATE, LOWEST, WARMUP, DECAY_STEPS = 0.02, 0.005, 2, 8
CLIP, WEIGHT_DECAY, EPS, BETAS = 0.5, 0.3, 0.1, (0.9, 0.95)
MEGATRON: dict[str, Any] = {
    "lr": RATE,
    "min_lr": LOWEST,
    "lr_decay_style": "linear",
    "lr_warmup_iters": WARMUP,
    "lr_decay_iters": DECAY_STEPS,
    "start_weight_decay": WEIGHT_DECAY,
    "end_weight_decay": WEIGHT_DECAY,
    "weight_decay": WEIGHT_DECAY,
    "adam_eps": EPS,
    "adam_beta1": BETAS[0],
    "adam_beta2": BETAS[1],
    "clip_grad": CLIP,
}


def rate_of(step: int) -> float:
    """Learning rate of an optimizer step, counted from 0: a linear warm-up, then a linear decay."""
    if step <= WARMUP:
        return RATE * step / WARMUP
    return RATE - (RATE - LOWEST) * (step - WARMUP) / (DECAY_STEPS - WARMUP)


def mean_loss(model: Any, samples: tuple[TrainSample, ...]) -> torch.Tensor:
    """Mean negative log-prob of the trained tokens."""
    total, count = torch.zeros(()), 0.0
    for sample in samples:
        tokens, mask = torch.from_numpy(sample.tokens).long(), torch.from_numpy(sample.loss_mask)
        first = sample.num_tokens - sample.response_length
        log_probs = torch.log_softmax(model(tokens[None]).logits[0].float(), -1)
        total = total - (log_probs[first - 1 : -1].gather(1, tokens[first:, None])[:, 0] * mask).sum()
        count += float(mask.sum())
    return total / count


def plain_steps(model: Any, batches: list[TrainBatch]) -> Iterator[float]:
    """Trains with nothing but torch; yields each step's norm of the gradient before the clip."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},  # norms
        ],
        betas=BETAS,
        eps=EPS,
    )
    step = 0
    for batch in batches:
        size = len(batch.samples) // STEPS_PER_BATCH
        for first in range(0, len(batch.samples), size):
            for group in optimizer.param_groups:
                group["lr"] = rate_of(step)
            optimizer.zero_grad()
            mean_loss(model, batch.samples[first : first + size]).backward()
            yield float(torch.nn.utils.clip_grad_norm_(parameters, CLIP))
            optimizer.step()
            step += 1


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_weights_and_norms_are_those_of_torch(family: str, tmp_path: Path, make_backend: Callable[..., Any]) -> None:
    """Law: one norm over all parameters (experts have an optimizer of their own), gradients of this step alone."""
    checkpoint = write_tiny_model(tmp_path / "model", family)
    batches = [random_batch(seed=20 + i) for i in range(BATCHES)]
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    start = {n: t.clone() for n, t in by_checkpoint_name((n, p.detach()) for n, p in model.named_parameters()).items()}
    norms = list(plain_steps(model, batches))
    assert min(norms) > CLIP and max(norms) > 1.2 * min(norms), "a clip that never acts, or always alike"
    want = by_checkpoint_name((n, p.detach()) for n, p in model.named_parameters())

    backend = make_backend(
        checkpoint, megatron=MEGATRON, loss_type="sft_loss", calculate_per_token_loss=True, global_batch_size=4
    )
    for number, batch in enumerate(batches):
        metrics = backend.train(batch)
        mine = slice(STEPS_PER_BATCH * number, STEPS_PER_BATCH * (number + 1))
        assert metrics["train/num_updates"] == STEPS_PER_BATCH
        assert metrics["train/grad_norm"] == pytest.approx(sum(norms[mine]) / STEPS_PER_BATCH, rel=1e-4)
        rates = [rate_of(step) for step in range(*mine.indices(len(norms)))]
        assert metrics["train/lr-pg_0"] == pytest.approx(sum(rates) / STEPS_PER_BATCH, rel=1e-6)
    got = dict(backend.iter_hf_tensors())
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        moved = float((tensor - start[name]).norm())
        assert moved > 0.0, f"{name} has not moved: nothing is compared"
        off = float((got[name] - tensor).norm())
        assert off <= 1e-3 * moved, f"{name} is off by {off / moved:.1e} of its way"
