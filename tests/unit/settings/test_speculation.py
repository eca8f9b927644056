"""Which drafts are trained, synced and served: what contradicts is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.core.topology import EngineLayout
from slime.settings import parse_args
from slime.settings.topology_yaml import layout_of
from tests.support.command_line import refused

DRAFT = "--sglang-speculative-algorithm NEXTN"
CONFIG = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "vocab_size": 128,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 1,
}


@pytest.fixture
def with_layer(base: list[str], tmp_path: Path) -> list[str]:
    """The command line of a run whose checkpoint has a layer of multi-token prediction."""
    checkpoint = tmp_path / "deepseek"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(CONFIG))
    words = list(base)
    words[words.index("--hf-checkpoint") + 1] = str(checkpoint)
    return words


def on_gpu(words: list[str]) -> list[str]:
    return [*words, "--device", "cuda"]


def test_the_loss_is_scaled_as_scripts_expect(with_layer: list[str]) -> None:
    args = parse_args([*with_layer, "--enable-mtp-training", "--mtp-num-layers", "1"])
    assert args.enable_mtp_training and args.megatron["mtp_loss_scaling_factor"] == 0.2
    assert not parse_args(with_layer).enable_mtp_training


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--enable-mtp-training --mtp-num-layers 2", "only one multi-token-prediction layer"),
        ("--enable-mtp-training --use-prefix-sharing", "a token can have several successors"),
        ("--enable-mtp-training --lora-rank 8", "only adapters"),
        (DRAFT, "GPU kernels"),
    ],
)
def test_what_cannot_be_trained_is_refused(with_layer: list[str], flags: str, said: str) -> None:
    assert said in refused([*with_layer, *flags.split()])


def test_a_checkpoint_without_the_layer_is_refused(base: list[str]) -> None:
    assert "cannot train an MTP layer of" in refused([*base, "--enable-mtp-training"])
    assert "cannot train an MTP layer of" in refused([*on_gpu(base), *DRAFT.split()])


@pytest.mark.parametrize("algorithm", ["NEXTN", "EAGLE", "nextn"])
def test_the_checkpoints_own_layer_is_served(with_layer: list[str], algorithm: str) -> None:
    words = [*on_gpu(with_layer), "--sglang-speculative-algorithm", algorithm]
    args = parse_args(words)
    assert layout_of(1, args.sglang) == EngineLayout(draft=True)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--sglang-speculative-algorithm EAGLE3", "a multi-token-prediction layer"),
        (f"{DRAFT} --sglang-speculative-draft-model-path elsewhere", "which is synced"),
        (f"{DRAFT} --sglang-speculative-token-map some.pt", "output layer"),
        (f"{DRAFT} --sglang-speculative-accept-threshold-single 0.5", "no longer be sampled from the policy"),
        (f"{DRAFT} --pause-generation-mode retract --fully-async", "use abort"),
        (f"{DRAFT} --use-rollout-routing-replay", "not tested"),
    ],
)
def test_other_drafts_are_refused(with_layer: list[str], flags: str, said: str) -> None:
    assert said in refused([*on_gpu(with_layer), *flags.split()])


def test_a_draft_that_is_not_trained_outlives_its_memory(with_layer: list[str]) -> None:
    words = [*on_gpu(with_layer), "--colocate", *DRAFT.split()]
    assert parse_args(words).sglang["enable_draft_weights_cpu_backup"] is True
    assert "enable_draft_weights_cpu_backup" not in parse_args([*words, "--enable-mtp-training"]).sglang
