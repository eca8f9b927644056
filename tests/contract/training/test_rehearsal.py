"""A rehearsal leaves no trace in what is trained after it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.training.rehearsal import rehearsed_batch
from slime.training.step.loss import objective_of
from slime.training.step.train_step import rehearse_step
from tests.support.marks import quick
from tests.support.tiny import write_tiny_model
from tests.support.training import random_batch


@contextlib.contextmanager
def tokens_of_passes(backend: Any) -> Iterator[list[int]]:
    """The tokens of each forward pass in the block."""
    seen: list[int] = []
    hook = backend._trainable.chunks[0].register_forward_hook(lambda _, given, out: seen.append(given[0].numel()))
    try:
        yield seen
    finally:
        hook.remove()


@pytest.mark.parametrize("family", quick(["qwen3", "qwen3_moe"], "qwen3_moe"))
def test_training_after_a_rehearsal_gives_the_same_bits(
    tmp_path: Path, make_backend: Callable[..., Any], family: str
) -> None:
    checkpoint, batch = write_tiny_model(tmp_path / "model", family), random_batch()
    trained = {}
    for rehearses in (False, True):
        backend = make_backend(checkpoint)
        if rehearses:
            prepared = rehearsed_batch(2, 1, 24, vocab_size=128)
            objective = objective_of(backend.args, backend._algorithm)
            with tokens_of_passes(backend) as seen:
                rehearse_step(backend._context, objective, backend._trainable, prepared)
            assert seen == [24, 24], "both micro-batches went through the model"
            buffers = [b.grad_data for ddp in backend._trainable.ddps for b in ddp.buffers]
            assert buffers and not any(bool(b.any()) for b in buffers), "gradients are zeros"
        metrics = backend.train(batch)
        trained[rehearses] = metrics, {name: p.detach().clone() for name, p in backend.model.shards.items()}
    assert trained[True][0] == trained[False][0]
    assert all(torch.equal(value, trained[False][1][name]) for name, value in trained[True][1].items())
