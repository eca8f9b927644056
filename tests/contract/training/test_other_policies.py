"""Reference, teacher and old actor: each forward pass sees the weights that its name says, and a resume has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime.core.sample import NOT_SAMPLED
from slime.training.state import offloaded_policies
from tests.support.tiny import write_tiny_model
from tests.support.training import random_batch, with_samples

KL: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"}


def _at(rollout_id: int, version: int, seed: int = 0, odd_version: int | None = None) -> Any:
    """A batch whose tokens were sampled by `version`; those of every other sample by `odd_version`, if given."""
    batch = random_batch(seed=seed)
    samples = []
    for i, s in enumerate(batch.samples):
        own = odd_version if odd_version is not None and i % 2 else version
        samples.append(dataclasses.replace(s, token_versions=np.where(s.loss_mask > 0, own, -1).astype(np.int32)))
    return dataclasses.replace(with_samples(batch, samples), rollout_id=rollout_id)


def _mean(batch: Any, log_probs: list[Any]) -> float:
    """As `train/ref_log_probs`: over all trained tokens."""
    masks = [s.loss_mask for s in batch.samples]
    return sum(float((x * m).sum()) for x, m in zip(log_probs, masks, strict=True)) / sum(float(m.sum()) for m in masks)


def test_the_reference_follows_every_n_rollouts_and_survives_a_resume(
    tiny_qwen3: Path, tmp_path: Path, make_backend: Callable[..., Any]
) -> None:
    settings = {**KL, "ref_load": str(tiny_qwen3), "ref_update_interval": 2}
    backend = make_backend(tiny_qwen3, **settings)
    before: list[float] = []
    told = []
    for step in range(4):
        batch = _at(step, 1 + step)
        before.append(_mean(batch, backend.log_probs(batch)))
        told.append(backend.train(batch)["train/ref_log_probs"])
        if step == 2:
            backend.save(tmp_path / "mid")
    assert told == pytest.approx([before[0], before[0], before[2], before[2]], abs=1e-5)
    assert abs(before[2] - before[0]) > 1e-3, "nothing was trained"
    again = make_backend(tiny_qwen3, **settings)
    again.load(tmp_path / "mid")
    assert again.train(_at(3, 4))["train/ref_log_probs"] == told[3]


def test_the_initial_weights_are_not_read_twice(
    tiny_qwen3: Path, tmp_path: Path, make_backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    load = offloaded_policies.load_weights
    monkeypatch.setattr(offloaded_policies, "load_weights", lambda model, d: (read.append(d), load(model, d)))
    make_backend(tiny_qwen3, **KL, ref_load=str(tiny_qwen3 / "."), keep_old_actor=True)
    assert read == []
    other = write_tiny_model(tmp_path / "other", "qwen3", seed=3)
    make_backend(tiny_qwen3, **KL, ref_load=str(other))
    assert read == [], "the trainer starts from it, too"
    make_backend(tiny_qwen3, **KL, load=str(tiny_qwen3), ref_load=str(other))
    assert read == [other]


def test_a_reference_is_no_mixture(tiny_qwen3: Path, tmp_path: Path, make_backend: Callable[..., Any]) -> None:
    """Law: what a checkpoint brings of frozen parameters is the policy's, and not that of the reference."""
    batch = random_batch()
    first = make_backend(tiny_qwen3)
    want = _mean(batch, first.log_probs(batch))
    for _ in range(3):
        first.train(batch)
    first.save(tmp_path / "trained")
    frozen = {"freeze_params_name_list": ("mlp",), "finetune": True}
    second = make_backend(tiny_qwen3, **KL, ref_load=str(tiny_qwen3), **frozen)
    second.load(tmp_path / "trained")
    assert abs(_mean(batch, second.log_probs(batch)) - want) > 1e-3, "nothing was trained"
    assert second.train(batch)["train/ref_log_probs"] == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_rank": 2},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"freeze_params_name_list": ("embed",)}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_old_log_probs_are_those_of_the_weights_that_sampled(
    settings: dict[str, Any], tiny_qwen3: Path, tmp_path: Path, make_backend: Callable[..., Any]
) -> None:
    backend = make_backend(tiny_qwen3, **settings, keep_old_actor=True)
    backend.note_synced()
    history: dict[int, list[Any]] = {}
    probe = random_batch()

    def turn(step: int) -> None:
        history[backend.weight_version] = backend.log_probs(probe)
        backend.train(_at(step, backend.weight_version, seed=5))
        backend.weight_version += 1
        backend.note_synced()

    for step in range(3):
        turn(step)
    history[4] = backend.log_probs(probe)

    def check(backend: Any, batch: Any, expected: list[int]) -> None:
        log_probs = backend.with_advantages(batch).log_probs
        for i, version in enumerate(expected):
            trained = batch.samples[i].loss_mask > 0
            np.testing.assert_array_equal(log_probs.old[i][trained], history[version][i][trained])

    check(backend, _at(4, 4), [4] * 8)
    check(backend, _at(4, 3), [3] * 8)
    check(backend, _at(4, 4, odd_version=3), [4, 3] * 4)
    check(backend, _at(4, NOT_SAMPLED), [4] * 8)
    assert not np.array_equal(history[3][0], history[4][0])
    same = {n: p.detach().clone() for n, p in backend.model.shards.items()}
    backend.train(_at(4, 3))
    backend.save(tmp_path / "mid")  # trained, and not yet published: engines still sample with version 4
    again = make_backend(tiny_qwen3, **settings, keep_old_actor=True)
    again.load(tmp_path / "mid")
    again.weight_version = 5
    again.note_synced()
    check(again, _at(5, 4), [4] * 8)
    assert any(not torch.equal(p, same[n]) for n, p in again.model.shards.items())
