"""Replay of experts is refused where there is nothing to replay, and where a layer would not know its row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.settings import parse_args
from tests.support.command_line import QWEN3, listed, refused

EXPERTS = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
RECORD = "--sglang-enable-return-routed-experts"
OF_ROLLOUTS, OF_OLD_PASSES = "--use-rollout-routing-replay", "--use-routing-replay"


TWO_STEPS = ["--num-steps-per-rollout", "2"]
"""The second one is after a pass of the old policy."""


@pytest.fixture
def experts(base: list[str]) -> list[str]:
    (Path(base[1]) / "config.json").write_text(json.dumps(EXPERTS))
    return base


def test_engines_of_a_replaying_run_record(experts: list[str]) -> None:
    args = parse_args([*experts, OF_ROLLOUTS, "--strict"])
    assert args.sglang["enable_return_routed_experts"] is True and not args.idle
    assert not parse_args(experts).sglang.get("enable_return_routed_experts")
    assert parse_args([*experts, RECORD]).use_rollout_routing_replay is False, "compared only"


@pytest.mark.parametrize("flag", [OF_ROLLOUTS, OF_OLD_PASSES, RECORD])
def test_a_dense_model_has_no_choice(flag: str, base: list[str]) -> None:
    assert f"{flag} has nothing to route" in refused([*base, *TWO_STEPS, flag])


@pytest.mark.parametrize("flag", [OF_ROLLOUTS, OF_OLD_PASSES])
@pytest.mark.parametrize(
    ("flags", "because"),
    [
        ("--recompute-granularity selective --recompute-modules moe", "use --recompute-granularity full"),
    ],
)
def test_a_layer_that_runs_again_alone_is_refused(flags: str, because: str, flag: str, experts: list[str]) -> None:
    assert because in refused([*experts, *TWO_STEPS, flag, *flags.split()])


@pytest.mark.parametrize(
    ("flags", "because"),
    [
        ("--sglang-enable-hierarchical-cache", "loses its recorded experts"),
        ("--sglang-enable-two-batch-overlap", "each other's record"),
        ("--sglang-pp-size 2 --rollout-num-gpus-per-engine 2 --rollout-num-gpus 2", "each stage"),
    ],
)
def test_engines_that_would_lose_the_record_are_refused(flags: str, because: str, experts: list[str]) -> None:
    assert because in refused([*experts, OF_ROLLOUTS, *flags.split()])


def test_full_recompute_knows_its_row(experts: list[str]) -> None:
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    parse_args([*experts, OF_ROLLOUTS, *full.split()])


def test_an_old_policys_choice_needs_its_pass(experts: list[str]) -> None:
    assert "use_routing_replay" in listed(parse_args([*experts, OF_OLD_PASSES]))
    parse_args([*experts, OF_OLD_PASSES, *TWO_STEPS, "--strict"])


def test_megatrons_own_flag_names_these(experts: list[str]) -> None:
    assert OF_ROLLOUTS in refused([*experts, "--moe-enable-routing-replay"])
