"""An estimator in a user's file only: chosen on the command line it trains, is checkpointed around, and resumes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime.settings import parse_args
from slime.training.backend import MegatronBackend
from slime.training.parallel import destroy_process_groups
from tests.support.command_line import complete
from tests.support.training import free_port, random_batch

OWN = '''
"""A user's file, outside of the package."""

from dataclasses import dataclass

import numpy as np

from slime.algorithms.advantages import AdvantageEstimator, Estimate, RewardedBatch
from slime.settings.fields import opt


@dataclass(frozen=True, kw_only=True)
class AboveThreshold(AdvantageEstimator):
    """The reward less a constant, at every trained token."""

    my_threshold: float = opt(0.0, ge=-10)
    """What a reward has to exceed."""

    def estimate(self, batch: RewardedBatch) -> Estimate:
        scores = np.nan_to_num(batch.rewards - self.my_threshold)
        return Estimate(tuple(score * np.asarray(mask, np.float64) for score, mask in zip(scores, batch.masks)))
'''


@contextlib.contextmanager
def trainer(words: list[str]) -> Iterator[MegatronBackend]:
    """One rank, as a run makes it."""
    try:
        backend = MegatronBackend(
            parse_args(words), rank=0, world_size=1, local_rank=0, master_address="127.0.0.1", master_port=free_port()
        )
        with contextlib.closing(backend):
            backend.weight_version = 1
            yield backend
    finally:
        destroy_process_groups()


def weights(backend: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.iter_hf_tensors()}


def test_it_trains_and_a_resume_equals_not_stopping(tiny_qwen3: Path, tmp_path: Path) -> None:
    file = tmp_path / "my_estimator.py"
    file.write_text(OWN)
    words = [*complete(tmp_path), "--hf-checkpoint", str(tiny_qwen3), "--device", "cpu", "--no-bf16", "--lr", "1e-3"]
    words += ["--micro-batch-size", "2", "--mismatch-limit", "1e9"]
    words += ["--advantage-estimator", f"{file}:AboveThreshold", "--my-threshold", "0.25"]
    batches = [random_batch(seed=seed) for seed in range(2)]
    with trainer(words) as whole:
        before = weights(whole)
        first = whole.train(batches[0])
        whole.save(tmp_path / "mid")
        second = whole.train(batches[1])
        end = weights(whole)
    trained = [(s.reward - 0.25, int(s.loss_mask.sum())) for s in batches[0].samples]
    mean = sum(score * num for score, num in trained) / sum(num for _, num in trained)
    assert first["train/advantages"] == pytest.approx(mean), "the user's formula, with the user's setting"
    scores = np.repeat([score for score, _ in trained], [num for _, num in trained])
    spread = [first[f"train/advantages_{name}"] for name in ("std", "min", "max")]
    assert spread == pytest.approx([scores.std(), scores.min(), scores.max()])
    assert not torch.equal(before["model.norm.weight"], end["model.norm.weight"])
    with trainer(words) as resumed:
        resumed.load(tmp_path / "mid")
        assert resumed.train(batches[1]) == second
        assert all(torch.equal(tensor, end[name]) for name, tensor in weights(resumed).items())
