"""A cold start: supervised training teaches a random model the format and some sums; GRPO goes on from its export."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from recipes.tiny.tasks import RL_FILE, SFT_FILE
from tests.support.e2e import Flags, RealRun, started_and_finished

SFT_STEPS, RL_STEPS = 30, 16
MIN_RISE = 0.1
"""The accuracy of a step is over 200 samples: standard error 0.035, of the mean of three steps 0.02."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cold_start(runs: Path, tasks: Path, tiny_qwen3: Path) -> tuple[RealRun, Path]:
    """Supervised training of a random model, and its Hugging Face export."""
    export = runs / "cold-start-hf" / "{rollout_id}"
    flags: Flags = [
        "--hf-checkpoint",
        tiny_qwen3,
        "--loss-type",
        "sft_loss",
        "--prompt-data",
        tasks / SFT_FILE,
        "--input-key",
        "messages",
        "--rollout-batch-size",
        "25",
        "--n-samples-per-prompt",
        "1",
        "--num-rollout",
        str(SFT_STEPS),
        "--lr",
        "3e-3",
        "--lr-decay-style",
        "constant",
        "--no-bf16",
        "--save",
        runs / "cold-start-save",
        "--save-hf",
        export,
    ]
    return started_and_finished(runs / "cold-start", flags), Path(str(export).format(rollout_id=SFT_STEPS - 1))


@pytest.fixture(scope="module")
def reinforced(runs: Path, tasks: Path, cold_start: tuple[RealRun, Path]) -> RealRun:
    """GRPO by exact match, from the export."""
    flags: Flags = [
        "--hf-checkpoint",
        cold_start[1],
        "--prompt-data",
        tasks / RL_FILE,
        "--input-key",
        "prompt",
        "--label-key",
        "label",
        "--apply-chat-template",
        "--rollout-batch-size",
        "25",
        "--n-samples-per-prompt",
        "8",
        "--rollout-max-response-len",
        "4",
        "--num-rollout",
        str(RL_STEPS),
        "--lr",
        "2e-3",
        "--lr-warmup-iters",
        "3",
        "--lr-decay-style",
        "constant",
        "--no-bf16",
    ]
    return started_and_finished(runs / "reinforced", flags)


def test_supervised_loss_falls(cold_start: tuple[RealRun, Path]) -> None:
    """Law: the same command line with another loss learns from conversations, without an engine."""
    losses = cold_start[0].series("train", "train/loss")
    assert len(losses) == SFT_STEPS and fmean(losses[-3:]) < 0.3 * losses[0], losses
    assert not list((cold_start[0].run_dir / "logs").glob("engine_*")), "an engine was started for nothing"


def test_accuracy_rises_after_the_cold_start(reinforced: RealRun) -> None:
    """Law: the exported folder is a model like any other: it knows some of the sums, and GRPO teaches it more."""
    accuracy = reinforced.series("rollout", "rollout/raw_reward")
    assert 0.2 < accuracy[0] < 0.8, f"the cold start leaves nothing to learn, or taught nothing: {accuracy}"
    assert fmean(accuracy[-3:]) > accuracy[0] + MIN_RISE, accuracy
    assert reinforced.metrics("train")[0]["train/train_rollout_logprob_abs_diff_max"] <= 1e-5, (
        "the export is not what was trained"
    )


def test_both_runs_leave_nothing(cold_start: tuple[RealRun, Path], reinforced: RealRun) -> None:
    """Law: neither leaves a process, port, shared-memory file or temporary folder."""
    assert cold_start[0].left() == [] and reinforced.left() == []
