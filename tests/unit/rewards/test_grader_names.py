"""The names that the command line knows are the graders that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.core.errors import ConfigError
from slime.rewards.graders import ASYNC_TYPES, REGISTRY, SLOW_TYPES, load_grader
from slime.settings.graders import GRADERS, base_type
from tests.support.command_line import complete, refused


def test_the_command_line_and_the_registry_know_the_same_names() -> None:
    assert set(GRADERS) == set(REGISTRY) and set(GRADERS) >= ASYNC_TYPES | SLOW_TYPES
    assert all(callable(load_grader(name)) for name in GRADERS)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    assert base_type("boxed_math") == "math"
    with pytest.raises(ConfigError, match="'reasoning_gym'"):
        base_type("reasoning-gym")


@pytest.mark.parametrize("name", ["boxed_dapo", "boxed_deepscaler"])
def test_a_grader_that_finds_the_box_has_no_prefix(name: str) -> None:
    with pytest.raises(ConfigError, match="drop the prefix"):
        base_type(name)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--rm-type dapo", "pick one of score, acc"),
        ("--rm-type boxed_ifbench", "without --reward-key"),
        ("--rm-batch-size 4", "--rm-url"),
        ("--rm-type remote_rm --rm-url http://x --rm-batch-size 0", "1 or more"),
    ],
)
def test_a_grader_that_could_not_be_used_is_refused(tmp_path: Path, flags: str, said: str) -> None:
    assert said in refused([*complete(tmp_path), *flags.split()])
