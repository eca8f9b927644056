"""A task by name on the command line: its grader comes with it, and what is wrong with it is said before the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.settings import parse_args
from slime.settings.command_line import explain_args as explain
from slime.settings.eval_config import eval_datasets
from tests.support.command_line import complete, refused

TASK = "rg:spell_backward?size=20&seed=1"


def without(argv: list[str], *flags: str) -> list[str]:
    """The command line without these flags and their values."""
    cut = [i for flag in flags for i in (argv.index(flag), argv.index(flag) + 1)]
    return [word for i, word in enumerate(argv) if i not in cut]


@pytest.mark.slow
def test_the_grader_comes_with_the_data_unless_another_is_asked_for(tmp_path: Path) -> None:
    base = without(complete(tmp_path), "--prompt-data", "--rm-type", "--num-rollout")
    held_out = ["--eval-prompt-data", "held", f"{TASK}&min_word_len=4", "--eval-interval", "1"]
    args = parse_args([*base, "--prompt-data", TASK, "--num-epoch", "2", *held_out])
    assert args.rm_type == "reasoning_gym" and "derived: it comes with the prompt data" in explain(args)
    assert args.num_rollout == 2 * (20 // 4), "rows of a task are counted without making them"
    assert eval_datasets(args)[0].rm_type is None, "the run's"
    assert parse_args([*base, "--prompt-data", TASK, "--num-rollout", "1", "--rm-type", "f1"]).rm_type == "f1"


@pytest.mark.slow
def test_a_held_out_task_beside_a_file_has_its_own_grader(tmp_path: Path) -> None:
    args = parse_args([*complete(tmp_path), "--eval-prompt-data", "held", TASK, "--eval-interval", "1"])
    assert args.rm_type == "math" and [d.rm_type for d in eval_datasets(args)] == ["reasoning_gym"]


def test_what_a_task_cannot_be_is_said_before_the_start(tmp_path: Path) -> None:
    base = without(complete(tmp_path), "--prompt-data")
    for name, says in {
        "rg:spell_bakward": "no task 'spell_bakward'; use one of spell_backward",
        "rg:spell_backward?size=none": "size must be an integer >= 1, got none",
        "gr:spell_backward": "--prompt-data gr: there is no such data scheme; choose from rg",
    }.items():
        assert says in refused([*base, "--prompt-data", name])
