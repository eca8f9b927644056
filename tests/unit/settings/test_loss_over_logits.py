"""Logits for a loss function: asked for by name, refused where a rank has no whole rows."""

from __future__ import annotations

import pytest

from slime.core.errors import HookError
from slime.settings import parse_args
from slime.settings.hook_contracts import check_hooks
from tests.support.command_line import listed, refused

OWN = ["--loss-type", "custom_loss", "--custom-loss-function-path", "own.loss", "--custom-loss-logits"]


def test_logits_are_for_a_function_of_the_user(base: list[str]) -> None:
    assert parse_args([*base, *OWN, "--strict"]).custom_loss_logits
    assert "--custom-loss-function-path" in listed(parse_args([*base, "--custom-loss-logits"]))


def test_a_public_loss_over_logits_needs_the_flag(base: list[str]) -> None:
    """Law: a function whose parameter is called logits is never handed log-probs; the refusal names the row."""
    own = [*base, *OWN[:3], "examples.own_algorithm:cross_entropy"]
    with pytest.raises(HookError, match=r"add --custom-loss-logits.*migration\.md, row --custom-loss-function-path"):
        check_hooks(parse_args(own))
    check_hooks(parse_args([*own, "--custom-loss-logits"]))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--context-parallel-size 2 --actor-num-gpus-per-node 2", "whose ranks hold shards of rows"),
        ("--use-prefix-sharing", "whose rows contain a shared prefix only once"),
    ],
)
def test_logits_of_parts_of_samples_are_refused(base: list[str], words: str, said: str) -> None:
    message = refused([*base, *OWN, *words.split()])
    assert said in message and "compute the loss from log-probs" in message
