"""What an engine would refuse with every request is refused at the command line; what it can serve is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.core.hf_config import context_length_of
from slime.settings import parse_args
from tests.support.command_line import refused

FACTOR = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({}, None),
        ({"max_position_embeddings": 1024}, 1024),
        ({"max_position_embeddings": 1024, "rope_scaling": None}, 1024),
        ({"max_position_embeddings": 1024, "rope_scaling": FACTOR}, 4096),
        ({"max_position_embeddings": 1024, "rope_parameters": FACTOR}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {**FACTOR, "original_max_position_embeddings": 1024}}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 4096),
        ({"max_position_embeddings": 4096, "max_seq_len": 512}, 512),
    ],
)
def test_the_context_is_the_engines(config: dict[str, Any], length: int | None) -> None:
    assert context_length_of(config) == length


@pytest.fixture
def of_512(base: list[str]) -> list[str]:
    """The command line for a model of 512 tokens."""
    path = Path(base[base.index("--hf-checkpoint") + 1]) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 512}))
    return base


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--rollout-max-response-len 1024", "rollout_max_response_len 1024"),
        ("--rollout-max-response-len 512", "at most 512 tokens"),
        ("--rollout-max-context-len 513", "lower --rollout-max-context-len"),
        (
            "--rollout-max-response-len 8 --eval-interval 1 --eval-prompt-data a DATA --eval-max-response-len 512",
            "on a",
        ),
        ("--rollout-max-response-len 300 --sglang-context-length 256", "at most 256 tokens"),
    ],
)
def test_a_response_beyond_the_context_is_refused(of_512: list[str], flags: str, said: str) -> None:
    data = of_512[of_512.index("--prompt-data") + 1]
    assert said in refused([*of_512, *flags.replace("DATA", data).split()])


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--rollout-max-response-len 511",
        "--rollout-max-context-len 512",
        "--sglang-context-length 2048",
        "--sglang-allow-auto-truncate",
        "--custom-generate-function-path a.b",
        "--loss-type sft_loss",
    ],
)
def test_what_can_be_served_or_is_not_asked_passes(of_512: list[str], flags: str) -> None:
    parse_args([*of_512, *flags.split()])
