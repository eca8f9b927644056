"""What the driver's saver does with the checkpoints of a run that resumes."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.cluster.launch_run import saves_nothing
from slime.cluster.saving import Saver, changed_settings, compared_settings
from slime.cluster.training_run import Run
from slime.core.errors import CheckpointError
from slime.training.state import checkpoint
from tests.support.rollout import rollout_args


def _write(root: Path, rollout_id: int) -> None:
    parts = checkpoint.begin(root, rollout_id)
    (parts / "rank_00000.safetensors").write_text("weights")
    checkpoint.commit(parts, rollout_id)


@pytest.mark.parametrize(("flags", "kept"), [(["--ckpt-step", "5"], [6, 7]), (["--finetune"], [5, 6, 7]), ([], [])])
def test_retention_leaves_the_other_branch_alone(tmp_path: Path, flags: list[str], kept: list[int]) -> None:
    """Law: a run that resumes from an earlier step of its --save folder keeps the later ones."""
    save = tmp_path / "save"
    for step in (5, 6, 7):
        _write(save, step)
    args = rollout_args(tmp_path, "--load", str(save), "--save", str(save), "--save-keep-last", "1", *flags)

    def done(*_given: Any, **_named: Any) -> None: ...

    actors: Any = SimpleNamespace(trainers=[], on_rollout=done, on_trainers=done)
    assert Saver(args, actors, tracker=SimpleNamespace()).restore() == (5 if "5" in flags else 7)  # type: ignore[arg-type]
    for step in (8, 9):
        _write(save, step)
        checkpoint.prune(save, keep_last=args.save_keep_last)
    assert sorted(int(path.name[-6:]) for path in save.glob("step_*")) == [*kept, 9]


def test_a_run_that_continues_by_itself_goes_back_to_the_newest_good_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Law: damage is logged with the file, and costs the steps since the checkpoint before. Whoever chooses a step, or
    loads from another folder, gets the error."""
    save = tmp_path / "save"
    for step in (5, 6, 7):
        _write(save, step)
    for step in (6, 7):
        (save / f"step_{step:06d}" / "rank_00000.safetensors").write_text("wejghts")
    actors: Any = SimpleNamespace(trainers=[], on_rollout=lambda *_, **__: None, on_trainers=lambda *_, **__: None)

    def restored(*flags: str) -> int | None:
        args = rollout_args(tmp_path, "--load", str(save), *flags)
        return Saver(args, actors, tracker=SimpleNamespace()).restore()  # type: ignore[arg-type]

    with caplog.at_level(logging.ERROR):
        assert restored("--save", str(save)) == 5
    assert "step_000007 is damaged: rank_00000.safetensors was altered" in caplog.text
    assert "The run continues from step_000005 instead" in caplog.text
    for flags in (["--save", str(save), "--ckpt-step", "7"], ["--save", str(tmp_path / "other")]):
        with pytest.raises(CheckpointError, match="step_000007 is damaged"):
            restored(*flags)


@pytest.mark.parametrize(
    ("flags", "lost"),
    [([], True), (["--save", "s"], False), (["--save-hf", "h"], False), (["--debug-rollout-only"], False)],
)
def test_a_run_says_if_its_weights_will_be_lost(tmp_path: Path, flags: list[str], lost: bool) -> None:
    flags = [str(tmp_path / word) if not word.startswith("-") else word for word in flags]
    assert saves_nothing(rollout_args(tmp_path, *flags)) is lost


@pytest.mark.parametrize("adapter", [False, True])
def test_a_run_says_where_its_export_is(tmp_path: Path, adapter: bool, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "step_3" / "adapter" if adapter else tmp_path).mkdir(parents=True, exist_ok=True)
    run: Any = object.__new__(Run)
    run.args = SimpleNamespace(save=None, save_hf=str(tmp_path / "step_{rollout_id}"), save_timeout_s=1.0)
    run._actors = SimpleNamespace(on_trainers=lambda *_given, **_named: None)
    with caplog.at_level(logging.INFO):
        run.save(3)
    also = f", and the adapters alone in {tmp_path}/step_3/adapter" if adapter else ""
    assert [record.message for record in caplog.records] == [f"the Hugging Face export is in {tmp_path}/step_3{also}"]


def test_a_resumed_run_says_which_settings_changed_and_what_comes_from_the_checkpoint(tmp_path: Path) -> None:
    """The expected line is written by hand."""
    before = compared_settings(rollout_args(tmp_path, "--lr", "1e-6"))
    parts = checkpoint.begin(tmp_path / "save", 3)
    (parts / "rank_00000.json").write_text("{}")
    kept = checkpoint.settings_of(checkpoint.commit(parts, 3, settings=before))
    assert changed_settings(rollout_args(tmp_path, "--lr", "1e-6"), kept, 4) is None
    new = ["--lr", "5e-7", "--num-rollout", "20"]
    assert changed_settings(rollout_args(tmp_path, *new), kept, 4) == (
        logging.WARNING,
        "changed since the checkpoint: lr 1e-06 -> 5e-07, num_rollout 9 -> 20; the new values apply from step 4 on, "
        "while weights, moments, data position and the position in the learning-rate schedule come from the checkpoint",
    )
    longer = changed_settings(rollout_args(tmp_path, "--lr", "1e-6", "--num-rollout", "20"), kept, 4)
    assert longer is not None and longer[0] == logging.INFO and "num_rollout 9 -> 20" in longer[1]
    told = changed_settings(rollout_args(tmp_path, *new, "--load", str(tmp_path / "save"), "--no-load-optim"), kept, 4)
    assert told is not None and "moments and schedule start over (--no-load-optim)" in told[1]
    assert changed_settings(rollout_args(tmp_path, *new), {}, 4) is None, "an older checkpoint names no settings"


def test_the_length_of_a_schedule_counts_only_if_it_decays(tmp_path: Path) -> None:
    assert "lr_decay_iters" not in compared_settings(rollout_args(tmp_path))
    assert compared_settings(rollout_args(tmp_path, "--lr-decay-style", "cosine"))["lr_decay_iters"] == 9
