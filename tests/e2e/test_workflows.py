"""The workflows as people start them: rejection sampling teaches digits, its model serves and teaches another one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from recipes.tiny.tasks import DIGITS_FILE, digit_fraction
from slime.rollout.recordings import load_rollout
from tests.support.e2e import ROOT, Flags, RealRun, started_and_finished

RECIPES = ROOT / "recipes" / "tiny"
MIN_RISE = 0.07
"""Of 64 answers of a random model, a tenth of whose characters are digits: three standard errors of the difference. How
far twelve steps lead differs between processors; 0.11 and more was seen."""
STEPS = 12
SERVING = re.compile(r"serving at (http://\S+)")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recipe(tasks: Path, tiny_qwen3: Path) -> Flags:
    """What both recipes leave to the user."""
    return ["--hf-checkpoint", tiny_qwen3, "--prompt-data", tasks / DIGITS_FILE]


@pytest.fixture(scope="module")
def rejected(runs: Path, recipe: Flags) -> tuple[RealRun, Path]:
    """Rejection sampling, and the export of its last step."""
    export = runs / "rejection-hf" / "{rollout_id}"
    own: Flags = [
        "--custom-config-path",
        RECIPES / "rejection.yaml",
        "--save-hf",
        export,
        "--dump-details",
        runs / "dump",
    ]
    return started_and_finished(runs / "rejection", [*recipe, *own]), Path(str(export).format(rollout_id=STEPS - 1))


@pytest.fixture(scope="module")
def teacher(runs: Path, rejected: tuple[RealRun, Path]) -> Iterator[tuple[RealRun, str]]:
    """The trained model behind the plain launcher, and its address."""
    flags: Flags = ["--debug-rollout-only", "--num-rollout", "0", "--no-bf16", "--hf-checkpoint", rejected[1]]
    with RealRun(runs / "teacher", flags) as run:
        run.wait_until("word of its address", lambda: SERVING.search(run.output) is not None)
        found = SERVING.search(run.output)
        assert found is not None, run.tail
        yield run, found[1]
        assert run.interrupt() == 130, f"a served model ends with Ctrl-C; {run.tail}"


def test_rejection_sampling_learns_what_it_keeps(rejected: tuple[RealRun, Path]) -> None:
    """Law: sampled answers that a filter keeps are learned like data."""
    reward = rejected[0].series("rollout", "rollout/raw_reward")
    assert len(reward) == STEPS and fmean(reward[-3:]) > reward[0] + MIN_RISE, reward


def test_a_dump_tells_what_was_learned(rejected: tuple[RealRun, Path]) -> None:
    """Law: rollouts and batches of every step are on disk; two of eight answers to a prompt were learned."""
    folder = rejected[0].run_dir.parent / "dump"
    groups = load_rollout(folder / "rollout_data" / "0.jsonl.zst")[1]
    assert [sum(not s.remove_sample for s in group) for group in groups] == [2] * len(groups)
    with np.load(folder / "train_data" / f"{STEPS - 1}.npz", allow_pickle=False) as arrays:
        masks = [arrays[name] for name in arrays if name.endswith("/loss_mask")]
    assert len(masks) == 64 and 0 < sum(bool(m.any()) for m in masks) <= 16


def test_part_of_a_dump_is_replayed(rejected: tuple[RealRun, Path], runs: Path, recipe: Flags) -> None:
    """Law: half of the recorded groups trains as a step of its own size, without an engine."""
    replay: Flags = [
        "--custom-config-path",
        RECIPES / "rejection.yaml",
        "--load-debug-rollout-data-subsample",
        "0.5",
        "--load-debug-rollout-data",
        runs / "dump" / "rollout_data" / "{rollout_id}.jsonl.zst",
        "--save-debug-train-data",
        runs / "half" / "{rollout_id}.npz",
    ]
    run = started_and_finished(runs / "replay", [*recipe, *replay])
    assert len(run.series("train", "train/loss")) == STEPS, run.tail
    with np.load(runs / "half" / "0.npz", allow_pickle=False) as arrays:
        assert sum(name.endswith("/loss_mask") for name in arrays) == 32


def test_a_student_learns_from_a_served_teacher(teacher: tuple[RealRun, str], runs: Path, recipe: Flags) -> None:
    """Law: a random model that gets no reward writes what its teacher would."""
    rollouts = runs / "student-rollouts" / "{rollout_id}.zst"
    own: Flags = [
        "--custom-config-path",
        RECIPES / "distillation.yaml",
        "--opd-teacher-url",
        teacher[1],
        "--opd-teacher-api-key",
        (teacher[0].run_dir / "router_key").read_text(),
        "--save-debug-rollout-data",
        rollouts,
    ]
    run = started_and_finished(runs / "student", [*recipe, *own])

    def digits(step: int) -> float:
        samples = [s for group in load_rollout(Path(str(rollouts).format(rollout_id=step)))[1] for s in group]
        return fmean(digit_fraction(None, s) for s in samples)

    assert fmean(map(digits, range(STEPS - 3, STEPS))) > digits(0) + MIN_RISE, [digits(i) for i in range(STEPS)]
    assert set(run.series("rollout", "rollout/raw_reward")) == {0.0}, "nobody graded"
