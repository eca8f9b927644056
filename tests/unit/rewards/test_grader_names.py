"""Graders are found by name: the built-in ones, and a user's by the path of its class."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.core.errors import ConfigError
from slime.core.sample import Sample
from slime.rewards.graders import GRADERS, make_grader
from slime.rewards.pool import GraderPool
from slime.rewards.scores import Score, Scored
from slime.settings import parse_args
from tests.support.command_line import complete, refused


def test_every_name_makes_a_grader() -> None:
    names = "code dapo deepscaler exact_match f1 gpqa ifbench ifbench_scores math random reasoning_gym remote_rm"
    assert [name for name, entry in GRADERS if entry.__module__.startswith("slime.")] == names.split()
    assert all(make_grader(name).name == name for name in GRADERS.names())


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    assert GRADERS.get("boxed_f1") is GRADERS.get("f1")
    with pytest.raises(ConfigError, match="did you mean reasoning_gym"):
        GRADERS.get("reasoning-gym")


@pytest.mark.parametrize("name", ["boxed_dapo", "boxed_deepscaler", "boxed_math"])
def test_a_grader_that_finds_the_box_has_no_prefix(name: str) -> None:
    with pytest.raises(ConfigError, match="drop the prefix"):
        GRADERS.get(name)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--rm-type dapo", "choose one of score, acc"),
        ("--rm-type boxed_ifbench_scores", "needs --reward-key"),
        ("--rm-type remote_rm --rm-batch-size 4", "--rm-url"),
        ("--rm-type remote_rm --rm-url http://x --rm-batch-size 0", "at least 1"),
    ],
)
def test_a_grader_that_could_not_be_used_is_refused(tmp_path: Path, flags: str, said: str) -> None:
    assert said in refused([*complete(tmp_path), *flags.split()])


OWN = "examples.own_grader"


@pytest.mark.parametrize("name", [OWN, f"{OWN}:RightLength", f"boxed_{OWN}.RightLength"])
def test_a_grader_of_the_user_is_found_by_its_path_and_takes_its_settings(name: str) -> None:
    async def work() -> Score:
        pool = GraderPool(num_workers=1, timeout_s=20.0, rm_type=name, args=SimpleNamespace(num_words=2))
        try:
            return await pool.score(Sample(response="\\boxed{one two}"))
        finally:
            await pool.close()

    assert asyncio.run(work()) == Scored(1.0)


def test_data_choose_no_code() -> None:
    """Law: an import path in a row is refused; the command line alone names files of the user's."""

    async def work() -> None:
        pool = GraderPool(num_workers=1, timeout_s=5.0, rm_type="math", eval_rm_types=["f1"])
        try:
            with pytest.raises(ConfigError, match="use one of"):
                await pool.score(Sample(response="x", metadata={"rm_type": f"{OWN}.RightLength"}))
        finally:
            await pool.close()

    asyncio.run(work())


def test_the_command_line_takes_a_grader_of_the_user(tmp_path: Path) -> None:
    words = complete(tmp_path)
    args: Any = parse_args([*words, "--rm-type", OWN, "--num-words", "7"])
    assert args.rm_type == OWN and args.num_words == 7
    assert "it must be a subclass of" in refused([*words, "--rm-type", "json.JSONDecoder"])


@pytest.mark.parametrize("name", GRADERS.names())
def test_every_grader_that_computes_on_texts_is_held(name: str) -> None:
    """Law: a process that reads answers has nothing, unless it waits for a service or starts programs in a sandbox."""
    kind = GRADERS.get(name)
    assert kind.held == (not kind.waits and not kind.needs_network and not kind.runs_code)
