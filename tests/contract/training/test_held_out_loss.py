"""The held-out loss: one number of a data set, whatever the layout, and nothing that training could notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.measured_backend import MeasuredBackend
from tests.support.ranks import Ranks, Seat
from tests.support.tiny import write_tiny_model
from tests.support.training import random_batch, training_args

SFT: dict[str, Any] = {"loss_type": "sft_loss"}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one": (1, {}, {"micro_batch_size": 1}),
    "packed": (1, {}, {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 30}),
    "dp2": (2, {}, {"micro_batch_size": 3}),
    "tp2": (2, {"tensor_model_parallel_size": 2}, {"micro_batch_size": 4}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}, {"micro_batch_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}, {"micro_batch_size": 2}),
}
NUM_GROUPS = 5
"""Of one sample: ranks get unequal numbers of them."""


def measured(seat: Seat, checkpoint: str, megatron: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """What a layout measures, and by hand from its log-probs."""
    args = training_args(Path(checkpoint), megatron=megatron, **SFT, **settings)
    backend = MeasuredBackend(args, **seat.place)
    batch = random_batch(NUM_GROUPS, 1, seed=3)
    found = backend.measure_loss(batch)
    trained = [lp[s.loss_mask > 0] for lp, s in zip(backend.log_probs(batch), batch.samples, strict=True)]
    backend.close()
    return {**found, "by_hand": -float(np.concatenate(trained).astype(np.float64).mean())}


@pytest.mark.slow
def test_the_held_out_loss_does_not_depend_on_the_layout(ranks: Ranks, tmp_path: Path) -> None:
    checkpoint = str(write_tiny_model(tmp_path / "model"))
    losses = {}
    for name, (world_size, megatron, settings) in LAYOUTS.items():
        told = ranks.run(measured, world_size, checkpoint, megatron, settings)
        assert all(one == told[0] for one in told), f"{name}: every rank has the same numbers"
        assert told[0]["loss"] == pytest.approx(told[0]["by_hand"], rel=1e-12)
        losses[name] = told[0]["loss"]
    num_trained = sum(int(s.loss_mask.sum()) for s in random_batch(NUM_GROUPS, 1, seed=3).samples)
    assert told[0]["num_tokens"] == num_trained
    assert losses == {name: pytest.approx(losses["one"], rel=1e-5) for name in LAYOUTS}


def test_training_with_evaluations_gives_the_same_bits_as_without(make_backend: Any, tmp_path: Path) -> None:
    checkpoint = write_tiny_model(tmp_path / "model")
    weights, draws = [], []
    for evaluates in (False, True):
        backend = make_backend(checkpoint, **SFT, micro_batch_size=3)
        for seed in range(3):
            if evaluates:
                backend.measure_loss(random_batch(NUM_GROUPS, 1, seed=9))
            metrics = backend.train(random_batch(seed=seed))
        weights.append({name: tensor.clone() for name, tensor in backend.iter_hf_tensors()})
        draws.append((torch.rand(3).tolist(), metrics))
    assert draws[0] == draws[1]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_loss_is_measured_on_the_weights_of_now(make_backend: Any, tmp_path: Path) -> None:
    backend = make_backend(write_tiny_model(tmp_path / "model"), **SFT)
    batch = random_batch(seed=0)
    before = backend.measure_loss(batch)["loss"]
    for _ in range(3):
        backend.train(batch)
    assert backend.measure_loss(batch)["loss"] < before
