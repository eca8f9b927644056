"""Names of other programs are answered with ours, and never taken."""

from __future__ import annotations

import re

import pytest

from slime.core.errors import ConfigError
from slime.settings import parse_args
from slime.settings.all_flags import flag_table
from slime.settings.public_flags import FOREIGN_NAMES
from slime.settings.schema import owned_spellings


def test_every_answer_names_flags_that_exist() -> None:
    known = flag_table().by_name
    wrong = {
        f"{name}: {flag}"
        for name, text in FOREIGN_NAMES.items()
        for flag in re.findall(r"--[a-z][a-z0-9-]+", text)
        if flag not in known and flag != "--help"
    }
    assert not wrong


def test_no_answer_stands_before_a_flag_of_ours() -> None:
    taken = {*flag_table().by_name, *owned_spellings()}
    assert not [name for name in FOREIGN_NAMES if f"--{name}" in taken]


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse_args(words)
    return str(error.value)


def test_all_unknown_flags_are_told_at_once() -> None:
    told = refusal(
        "--learning-rate", "1e-5", "--num-generations=8", "--model", "m", "--use-lora", "--rollout-batchsize", "4"
    )
    assert told.startswith("5 problems:")
    for answer in ("use --lr", "--n-samples-per-prompt", "--hf-checkpoint", "--lora-rank", "--rollout-batch-size"):
        assert answer in told


def test_wrong_values_and_owned_flags_are_told_with_them() -> None:
    told = refusal("--lr", "fast", "--colocate", "yes", "--sglang-tp-size", "2", "--train-iters", "5", "--nonsense")
    assert told.startswith("5 problems:") and "--colocate is a switch and takes no value" in told


def test_a_setting_written_as_verl_does_is_answered() -> None:
    told = refusal("actor_rollout_ref.actor.optim.lr=1e-6", "+data.train_batch_size=128", "a.b=c")
    assert "use --lr" in told and "--rollout-batch-size" in told and "'a.b=c' does not belong to a flag" in told


@pytest.mark.parametrize(("name", "answer"), [("--n-samples-per", "--n-samples-per-prompt"), ("--xyzzy", "see --help")])
def test_other_names_get_the_nearest_or_the_help(name: str, answer: str) -> None:
    assert answer in refusal(name)


def test_words_of_a_longer_name_find_it() -> None:
    assert "did you mean --wandb-random-suffix?" in refusal("--random-suffix")
