"""Experts: the shape is the checkpoint's, and settings that tie a token's gradient to its micro-batch are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.config.model_shape import contradictions
from slime.config.shapes import megatron_shape
from slime.core.errors import ConfigError
from slime.training.model.moe import check_moe
from tests.support.tiny import SHAPE

EXPERTS: dict[str, Any] = {
    **SHAPE,
    "model_type": "qwen3_moe",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def config(**changes: Any) -> TransformerConfig:
    shape = megatron_shape(EXPERTS)
    names = TransformerConfig.__dataclass_fields__
    return TransformerConfig(
        **{**{k: v for k, v in shape.items() if k in names}, **changes}, params_dtype=torch.float32
    )


def test_the_shape_is_read_in_both_spellings() -> None:
    want = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_router_pre_softmax": False}
    spellings = EXPERTS, {**EXPERTS, "num_experts": 4, "num_local_experts": None}
    assert all(want.items() <= megatron_shape(spelling).items() for spelling in spellings)
    assert megatron_shape({**EXPERTS, "norm_topk_prob": False})["moe_router_pre_softmax"] is True
    assert contradictions(megatron_shape(EXPERTS), {"moe_router_topk": 4}), "a flag that contradicts the checkpoint"
    assert "num_moe_experts" not in megatron_shape({**SHAPE, "model_type": "qwen3"})


@pytest.mark.parametrize("changes", [{"num_local_experts": 0}, {"num_experts_per_tok": 0}])
def test_experts_without_a_size_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"this release trains|lacks num_experts"):
        megatron_shape({**EXPERTS, **changes})


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"moe_aux_loss_coeff": 0.01}, "--moe-aux-loss-coeff 0.01"),
        ({"moe_z_loss_coeff": 1e-3}, "--moe-z-loss-coeff"),
        ({"moe_input_jitter_eps": 0.1}, "--moe-input-jitter-eps"),
        ({"moe_expert_capacity_factor": 1.0}, "--moe-expert-capacity-factor"),
        ({"tensor_model_parallel_size": 2}, "--sequence-parallel"),
        ({"moe_token_dispatcher_type": "flex"}, "DeepEP"),
    ],
)
def test_what_depends_on_the_cut_is_refused(changes: dict[str, Any], word: str) -> None:
    check_moe(config())
    with pytest.raises(ConfigError, match=word):
        check_moe(config(**changes))
