"""What a run of gpt-oss may not ask for is refused when flags are parsed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.settings import parse_args
from tests.support.command_line import refused
from tests.support.published import SYNCED

TRITON = "--sglang-moe-runner-backend triton"
LAYER = "--sglang-moe-runner-backend triton --lora-rank 4 --lora-target-modules"


@pytest.fixture
def words(base: list[str], tmp_path: Path) -> list[str]:
    folder = tmp_path / "gpt-oss"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SYNCED["gpt-oss-20b"][0]))
    own = [*base, "--device", "cuda"]
    own[own.index("--hf-checkpoint") + 1] = str(folder)
    return own


@pytest.mark.parametrize("flags", [TRITON, "--debug-train-only", f"{LAYER} self_attention"])
def test_what_is_trained_and_served_is_taken(words: list[str], flags: str) -> None:
    assert parse_args([*words, *flags.split()]).megatron["add_bias_linear"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "set --sglang-moe-runner-backend triton"),
        ("--sglang-moe-runner-backend triton_kernel", "in an order that the weight sync cannot verify"),
        (f"{LAYER} mlp", "add adapters to the experts of gpt-oss"),
        (f"{TRITON} --lora-rank 4", "add adapters to the experts of gpt-oss"),
        (
            f"{TRITON} --rollout-num-gpus-per-engine 2 --actor-num-gpus-per-node 2 --colocate",
            "one GPU per pipeline stage",
        ),
    ],
)
def test_what_is_not_is_refused(words: list[str], flags: str, said: str) -> None:
    assert said in refused([*words, *flags.split()])
