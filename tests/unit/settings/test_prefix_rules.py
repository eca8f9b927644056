"""Sharing prefixes is refused where a model cannot, and told where nothing could be shared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.core.errors import ConfigError
from slime.models import FAMILIES, prefix_problem
from slime.settings import parse_args
from tests.support.command_line import listed, refused
from tests.support.qwen_next import EXPERTS, LINEAR

SHARED = "--use-prefix-sharing"
NEXT = {**LINEAR, **EXPERTS, "model_type": "qwen3_next", "rms_norm_eps": 1e-6, "max_position_embeddings": 4096}


def _of(base: list[str], config: dict[str, Any]) -> list[str]:
    (Path(base[base.index("--hf-checkpoint") + 1]) / "config.json").write_text(json.dumps(config))
    return base


def test_it_is_off_unless_it_is_asked_for(base: list[str]) -> None:
    assert not parse_args(base).use_prefix_sharing
    args = parse_args([*base, SHARED])
    assert args.use_prefix_sharing and args.use_dynamic_batch_size and not args.idle


def test_a_state_along_the_sequence_is_refused(base: list[str]) -> None:
    message = refused([*_of(base, NEXT), SHARED])
    for said in ("--use-prefix-sharing does not work", "recurrent state", "drop the flag"):
        assert said in message
    assert parse_args(_of(base, NEXT)).hf_checkpoint


@pytest.mark.parametrize("flags", ["--micro-batch-size 1", "--no-use-dynamic-batch-size"])
def test_one_sample_by_itself_shares_with_nobody(base: list[str], flags: str) -> None:
    args = parse_args([*base, SHARED, *flags.split()])
    assert not args.use_prefix_sharing and "use_prefix_sharing True, which needs" in listed(args)
    assert parse_args([*base, SHARED, "--micro-batch-size", "4"]).use_prefix_sharing


def test_a_run_without_groups_is_told_so(base: list[str]) -> None:
    args = parse_args([*base, SHARED, "--n-samples-per-prompt", "1", "--no-rewards-normalization"])
    assert not args.use_prefix_sharing and "use_prefix_sharing True, which needs several samples" in listed(args)


SPLIT = "--actor-num-gpus-per-node 2 --context-parallel-size 2 --cp-comm-type"


@pytest.mark.parametrize(
    ("config", "said"),
    [({"num_key_value_heads": 1}, "2 ranks do not divide num_query_groups 1"), (NEXT, "recurrent state")],
)
def test_context_ranks_split_heads_only_where_they_can(base: list[str], config: dict[str, Any], said: str) -> None:
    own = json.loads((Path(base[base.index("--hf-checkpoint") + 1]) / "config.json").read_text())
    flags = f"{SPLIT} a2a"
    assert parse_args([*base, SHARED, *f"{SPLIT} a2a".split()]).megatron["cp_comm_type"] == "a2a"
    message = refused([*_of(base, {**(own if "model_type" not in config else {}), **config}), *flags.split()])
    assert said in message and "--cp-comm-type all_gather" in message


def test_other_exchanges_between_context_ranks_are_listed(base: list[str]) -> None:
    assert "keys and values are gathered" in listed(parse_args([*base, *f"{SPLIT} p2p".split()]))
    assert "cp_comm_type" not in listed(parse_args([*base, *f"{SPLIT} all_gather".split()]))
    assert "cp_comm_type" in listed(parse_args([*base, "--cp-comm-type", "a2a"])), "without other ranks"


def test_turns_of_a_conversation_are_samples_that_begin_alike(base: list[str]) -> None:
    assert parse_args([*base, SHARED, "--loss-type", "sft_loss"]).use_prefix_sharing


@pytest.mark.parametrize("flag", ["--custom-generate-function-path", "--rollout-function-path"])
def test_functions_of_users_may_make_groups(base: list[str], flag: str) -> None:
    alone = ["--n-samples-per-prompt", "1", "--no-rewards-normalization"]
    assert parse_args([*base, SHARED, *alone, flag, "json.loads"]).use_prefix_sharing


def test_every_family_has_an_answer() -> None:
    """Law: a family that says nothing does not share."""
    configs: dict[str, dict[str, Any]] = {name: {"model_type": name, "num_hidden_layers": 2} for name in dict(FAMILIES)}
    refusing = {name for name, config in configs.items() if prefix_problem(config) is not None}
    assert refusing == {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_vl_text"}
    assert "indexer" in str(prefix_problem({**configs["glm_moe_dsa"], "index_topk": 8}))
    with pytest.raises(ConfigError, match="model_type 'unheard_of'"):
        prefix_problem({"model_type": "unheard_of"})
