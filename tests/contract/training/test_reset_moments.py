"""Moments that begin anew with each step of the loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.marks import quick
from tests.support.training import random_batch

OFFLOAD: dict[str, Any] = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}


@pytest.mark.parametrize("held", quick([{}, OFFLOAD], {}), ids=["torch", "offload"])
def test_each_step_updates_as_a_new_optimizer_does(
    held: dict[str, Any], tiny_qwen3: Path, make_backend: Callable[..., Any]
) -> None:
    """Law: with the same weights and the same batch the second step makes the moments of the first, bit for bit."""

    def moments(num_steps: int, **settings: Any) -> list[torch.Tensor]:
        backend = make_backend(tiny_qwen3, megatron={"lr": 0.0, **held}, **settings)
        for _ in range(num_steps):
            backend.train(random_batch())
        states = [state for inner in backend._trainable.inner for state in inner.optimizer.state.values()]
        return [state[key].clone() for state in states for key in ("exp_avg", "exp_avg_sq")]

    first = moments(1)
    assert all(map(torch.equal, moments(2, reset_optimizer_states=True), first))
    assert not all(map(torch.equal, moments(2), first))
