"""Micro-batches are filled by tokens unless samples are counted on purpose, with room for the longest sample."""

from __future__ import annotations

import pytest

from slime.settings import parse_args
from slime.settings.command_line import explain_args as explain
from tests.support.command_line import listed


@pytest.mark.parametrize(
    ("flags", "room"),
    [
        ("", 2048),
        ("--rollout-max-response-len 8192", 8192),
        ("--rollout-max-response-len 8192 --rollout-max-prompt-len 1000", 9192),
        ("--rollout-max-context-len 4096", 4096),
        ("--use-dynamic-batch-size --rollout-max-response-len 3000", 3000),
        ("--max-tokens-per-gpu 100", 100),
        ("--context-parallel-size 2 --actor-num-gpus-per-node 2 --rollout-max-response-len 8191", 4096),
        ("--context-parallel-size 2 --actor-num-gpus-per-node 2", 2048),
    ],
)
def test_the_room_is_that_of_the_longest_sample(base: list[str], flags: str, room: int) -> None:
    """One sample by itself would need as much."""
    args = parse_args([*base, *flags.split()])
    assert args.use_dynamic_batch_size and args.max_tokens_per_gpu == room


@pytest.mark.parametrize(
    "flags",
    [
        "--micro-batch-size 4",
        "--no-use-dynamic-batch-size",
        "--pipeline-model-parallel-size 2 --actor-num-gpus-per-node 2",
    ],
)
def test_samples_are_counted_where_that_is_meant(base: list[str], flags: str) -> None:
    args = parse_args([*base, *flags.split()])
    assert not args.use_dynamic_batch_size and args.max_tokens_per_gpu is None
    assert args.micro_batch_size == (4 if "micro" in flags else 1) and not args.idle


def test_the_reason_is_explained_and_what_does_not_act_is_told(base: list[str]) -> None:
    text = explain(parse_args([*base, "--rollout-max-response-len", "5000"]))
    assert "the longest sample that the limits allow, 5000 tokens without the prompt, which has no limit, and" in text
    text = explain(parse_args([*base, "--rollout-max-response-len", "5000", "--rollout-max-prompt-len", "100"]))
    assert "the longest sample that the limits allow, 5100 tokens, and" in text
    args = parse_args([*base, "--micro-batch-size", "2", "--use-dynamic-batch-size"])
    assert args.use_dynamic_batch_size and "micro_batch_size 2, which needs --no-use-dynamic" in listed(args)
