"""Flags that repeat the checkpoint in other words are taken; what does nothing in its kind of model is listed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.settings import parse_args
from tests.support.command_line import QWEN3, listed, refused

LATENT = {
    **QWEN3,
    "model_type": "deepseek_v3",
    "num_hidden_layers": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
}


@pytest.fixture
def latent(base: list[str]) -> list[str]:
    (Path(base[1]) / "config.json").write_text(json.dumps(LATENT))
    return base


@pytest.mark.parametrize(
    "flags",
    [
        "--moe-layer-freq [0]*1+[1]*3",
        "--moe-layer-freq ([0]+[1]*3)",
        "--moe-layer-freq [0,1,1,1]",
        "--num-experts 4 --multi-latent-attention --q-lora-rank 32",
    ],
)
def test_the_same_in_other_words_is_taken(latent: list[str], flags: str) -> None:
    args = parse_args([*latent, *flags.split(), "--strict"])
    assert args.megatron["moe_layer_freq"] == [0, 1, 1, 1] and not args.idle


@pytest.mark.parametrize(
    "flags",
    ["--moe-layer-freq [0]*2+[1]*2", "--moe-layer-freq 1", "--moe-layer-freq [0]*3+__import__", "--v-head-dim 8"],
)
def test_another_model_than_the_checkpoint_is_refused(latent: list[str], flags: str) -> None:
    assert "contradicts the checkpoint's config.json" in refused([*latent, *flags.split()])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--kv-channels 128", "megatron.kv_channels 128, which needs attention with one head size"),
        ("--moe-router-pre-softmax", "megatron.moe_router_pre_softmax True, which needs a softmax router"),
        ("--rotary-scaling-factor 10", "which needs Megatron's own latent attention"),
        (
            "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0",
            "megatron.moe_router_load_balancing_type seq_aux_loss, which needs --moe-aux-loss-coeff",
        ),
    ],
)
def test_what_does_nothing_in_such_a_model_is_listed(latent: list[str], flags: str, said: str) -> None:
    args = parse_args([*latent, *flags.split()])
    assert said in listed(args) and args.megatron["kv_channels"] == 24 and not args.megatron["moe_router_pre_softmax"]
    assert said in refused([*latent, *flags.split(), "--strict"])
