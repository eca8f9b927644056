"""Experts: the architecture is the checkpoint's; settings that tie a gradient to its micro-batch are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.core.errors import ConfigError
from slime.models import architecture
from slime.models.common.config import is_sparse
from slime.settings import parse_args
from slime.settings.schema import contradictions
from tests.support.command_line import complete, refused
from tests.support.tiny import SHAPE

EXPERTS: dict[str, Any] = {
    **SHAPE,
    "rms_norm_eps": 1e-6,
    "model_type": "qwen3_moe",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GLM: dict[str, Any] = {
    **SHAPE,
    "rms_norm_eps": 1e-6,
    "model_type": "glm4_moe",
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "tie_word_embeddings": False,
}


def test_the_architecture_is_read_in_both_spellings() -> None:
    want = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_router_pre_softmax": False}
    spellings = EXPERTS, {**EXPERTS, "num_experts": 4, "num_local_experts": None}
    assert all(want.items() <= architecture(spelling).items() for spelling in spellings)
    assert architecture({**EXPERTS, "norm_topk_prob": False})["moe_router_pre_softmax"] is True
    assert contradictions(architecture(EXPERTS), {"moe_router_topk": 4}), "a flag that contradicts the checkpoint"
    assert contradictions(
        architecture({**SHAPE, "model_type": "qwen3", "rms_norm_eps": 1e-6}), {"num_moe_experts": 4}
    ), "a dense one"


def test_glm_experts_are_those_of_its_config() -> None:
    want = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": 64,
        "rotary_percent": 0.5,
        "rotary_interleaved": False,
        "add_qkv_bias": True,
        "qk_layernorm": False,
    }
    assert want.items() <= architecture(GLM).items()
    assert [is_sparse(GLM, layer) for layer in range(2)] == [False, True]
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        architecture({**GLM, "tie_word_embeddings": True})


@pytest.mark.parametrize("changes", [{"num_local_experts": 0}, {"num_experts_per_tok": 0}])
def test_experts_without_a_size_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"slime supports|must have num_experts"):
        architecture({**EXPERTS, **changes})


@pytest.mark.parametrize("size", [0, None])
def test_qwen3_next_without_a_shared_expert_is_refused_by_name(size: int | None) -> None:
    import transformers

    config = transformers.AutoConfig.for_model("qwen3_next").to_dict()
    assert architecture(config)["moe_shared_expert_intermediate_size"] == config["shared_expert_intermediate_size"]
    with pytest.raises(ConfigError, match=f"shared_expert_intermediate_size {size}"):
        architecture({**config, "shared_expert_intermediate_size": size})


@pytest.mark.parametrize("config", [EXPERTS, GLM])
def test_every_setting_that_the_router_reads_is_the_checkpoints(config: dict[str, Any]) -> None:
    """Otherwise a flag would train another model than the one that is loaded."""
    read = {"score_function", "pre_softmax", "topk_scaling_factor", "num_groups", "group_topk", "enable_expert_bias"}
    read |= {"topk", "dtype"}
    assert {f"moe_router_{name}" for name in read} <= architecture(config).keys()


@pytest.mark.parametrize(
    "flags, word",
    [
        ("--moe-aux-loss-coeff 0.01", "moe_aux_loss_coeff is 0.01"),
        ("--moe-z-loss-coeff 1e-3", "moe_z_loss_coeff"),
        ("--moe-input-jitter-eps 0.1", "moe_input_jitter_eps"),
        ("--moe-expert-capacity-factor 1.0", "moe_expert_capacity_factor"),
        ("--moe-router-force-load-balancing", "moe_router_force_load_balancing"),
        ("--moe-router-load-balancing-type sinkhorn", "moe_router_load_balancing_type"),
        ("--moe-router-bias-update-rate 0.001", "moe_router_bias_update_rate"),
        ("--moe-router-num-groups 2", "moe-router-num-groups 2"),
        ("--tensor-model-parallel-size 2 --actor-num-gpus-per-node 2 --no-sequence-parallel", "no-sequence-parallel"),
    ],
)
def test_what_depends_on_the_micro_batch_or_is_not_the_checkpoints_is_refused(
    flags: str, word: str, tmp_path: Path
) -> None:
    argv = complete(tmp_path)
    (tmp_path / "model" / "config.json").write_text(json.dumps({**EXPERTS, "vocab_size": 256}))
    parse_args(argv)
    assert word in refused([*argv, *flags.split()])
