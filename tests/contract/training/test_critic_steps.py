"""The critic: what it learns, and that a split of the model does not change how fast."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import Ranks
from tests.support.training import random_batch, with_samples
from tests.support.training_ranks import run_layouts

PPO: dict[str, Any] = {"advantage_estimator": "ppo", "critic_lr": 1e-2}


@pytest.mark.slow
def test_values_become_the_returns(tiny_qwen3: Path, make_backend: Callable[..., Any]) -> None:
    """Law: where every answer is worth 1, so is every token; an advantage would be satisfied with half of it."""
    backend = make_backend(
        tiny_qwen3, **PPO, critic_load=str(tiny_qwen3), gamma=1.0, lambd=1.0, num_critic_only_steps=100
    )
    batch = random_batch(seed=3)
    batch = with_samples(batch, [dataclasses.replace(s, reward=1.0) for s in batch.samples])
    for _ in range(12):
        metrics = backend.train(batch)
        assert metrics["train/returns"] == pytest.approx(1.0)
    assert metrics["train/critic-values"] == pytest.approx(1.0, abs=0.15)
    assert metrics["train/advantages"] == pytest.approx(0.0, abs=0.2)


OWN: dict[str, Any] = {"adam_beta2": 0.5, "clip_grad": 1e-3, "lr_warmup_iters": 4, "recompute_granularity": "selective"}
"""Settings that the critic alone has."""


def test_settings_of_the_critic_are_the_critic_s_alone(tiny_qwen3: Path, make_backend: Callable[..., Any]) -> None:
    """Law: what `--megatron-config-path` gives to the critic changes its update, and no bit of the policy's."""

    def trained(**own: Any) -> tuple[list[dict[str, float]], dict[str, list[Any]]]:
        backend = make_backend(tiny_qwen3, **PPO, critic_load=str(tiny_qwen3), lambd=0.9, critic=own)
        metrics = [backend.train(random_batch(seed=3))]
        both = {"policy": backend._trainable, "critic": backend._critic.trainable}
        chunks = {name: trainable.chunks[0].config.recompute_granularity for name, trainable in both.items()}
        assert chunks == {"policy": None, "critic": own.get("recompute_granularity")}
        groups = {name: trainable.optimizer.param_groups[0]["betas"][1] for name, trainable in both.items()}
        assert groups == {"policy": 0.95, "critic": own.get("adam_beta2", 0.95)}
        return metrics, {n: [p.detach().clone() for p in t.chunks[0].parameters()] for n, t in both.items()}

    (plain,), before = trained()
    (other,), after = trained(**OWN)
    assert other["train/critic-grad_norm"] == plain["train/critic-grad_norm"], "the same gradient"
    assert (plain["train/critic-lr-pg_0"], other["train/critic-lr-pg_0"]) == (1e-2, 0.0), "warm-up begins at zero"
    assert plain["train/lr-pg_0"] == other["train/lr-pg_0"]
    same = {name: all(map(torch.equal, before[name], after[name])) for name in before}
    assert same == {"policy": True, "critic": False}


@pytest.mark.slow
def test_a_critic_of_two_ranks_learns_as_that_of_one(tiny_qwen3: Path, tmp_path: Path, ranks: Ranks) -> None:
    """Law 3 for the critic: each rank has the whole head, and the hidden states feel it once. At first they do not: the
    head begins at zero."""
    layouts = {
        "one": {"world_size": 1, "megatron": {}},
        "tp2": {"world_size": 2, "megatron": {"tensor_model_parallel_size": 2}},
        "sp2": {"world_size": 2, "megatron": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
    }
    defaults = {"checkpoint": str(tiny_qwen3), "rounds": 3, "provoke": False}
    defaults["args"] = {**PPO, "critic_load": str(tiny_qwen3), "lambd": 0.9}
    outcomes = run_layouts(ranks, tmp_path, layouts, defaults=defaults)
    want = outcomes["one"].result["metrics"]
    for layout in ("tp2", "sp2"):
        for step, got in enumerate(outcomes[layout].result["metrics"]):
            for name in ("train/critic-grad_norm", "train/critic-value_loss", "train/critic-values"):
                assert got[name] == pytest.approx(want[step][name], rel=1e-3, abs=1e-6), f"{layout}, {step}: {name}"
