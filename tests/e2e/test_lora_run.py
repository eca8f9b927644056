"""Adapters in the whole loop on the real engines: they learn, and engines serve the merged weights.

Each sync compares digests of every resident tensor with what the trainer exports, so a run that ends well has verified
the merged weights of each version; the train-inference mismatch says that adapters beside frozen weights compute the
same model.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.test_loops import MAX_MISMATCH, MIN_RISE
from tests.support.e2e import NUM_STEPS, Flags, started_and_finished

LOUDNESS = 15
"""Of the output layer; the rounding of logits, and so of log-probs, grows as much."""
LORA: Flags = ["--lora-rank", "8", "--lr", "2e-2", "--lr-decay-style", "constant"]

pytestmark = pytest.mark.slow


def with_a_loud_head(model: Path, directory: Path) -> Path:
    """A copy whose output layer is `LOUDNESS` times larger: a random one that is frozen cannot make a token likely."""
    shutil.copytree(model, directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * LOUDNESS
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_adapters_learn_and_engines_serve_them_merged(
    runs: Path, digits: Callable[[Path], Flags], tiny_qwen3: Path, tmp_path: Path
) -> None:
    model = with_a_loud_head(tiny_qwen3, tmp_path / "model")
    where = ["--colocate", "--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2"]
    run = started_and_finished(
        runs / "lora", [*digits(model), *LORA, *where, "--rollout-num-gpus", "1", "--use-kl-loss"]
    )
    rewards = run.series("rollout", "rollout/raw_reward")
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + MIN_RISE, rewards
    worst = run.series("train", "train/train_rollout_logprob_abs_diff_max")
    assert len(worst) == NUM_STEPS and max(worst) <= LOUDNESS * MAX_MISMATCH, worst
    kl = run.series("train", "train/kl_loss")
    assert kl[0] == 0 < max(kl), f"the reference is the model without adapters: {kl}"


def test_the_old_actor_is_the_one_that_sampled(runs: Path, digits: Callable[[Path], Flags], tiny_llama: Path) -> None:
    """Old log-probs agree with the engines' on tokens that are a step older than the trainer."""
    flags = [*digits(tiny_llama), *LORA, "--keep-old-actor", "--num-rollout", "4"]
    rows = started_and_finished(runs / "old", flags, script="train_async.py").metrics("train")
    for step in range(1, 4):
        assert rows[step]["train/stale_tokens"] > 0, rows[step]
        assert rows[step]["train/train_rollout_logprob_abs_diff_stale"] <= MAX_MISMATCH, rows[step]
