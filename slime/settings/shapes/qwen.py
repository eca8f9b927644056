"""Qwen2 and 2.5 (biases on q, k, v), Qwen3 (norms of q and k), Qwen3 with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.core.errors import ConfigError
from slime.settings.model_shape import num_experts_of


def qwen2(_: Mapping[str, Any]) -> dict[str, Any]:
    """Biases on q, k and v are part of the architecture."""
    return {"add_qkv_bias": True}


def qwen3(_: Mapping[str, Any]) -> dict[str, Any]:
    """Norms of q and k per head."""
    return {"qk_layernorm": True}


def qwen3_moe(config: Mapping[str, Any]) -> dict[str, Any]:
    """Experts in all layers or in some. Raises `ConfigError` where their sizes are missing."""
    return {**qwen3(config), **softmax_experts(config)}


def softmax_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Experts chosen by the softmax of their scores. Raises `ConfigError` where their sizes are missing."""
    if not num_experts_of(config) or not config.get("moe_intermediate_size") or not config.get("num_experts_per_tok"):
        raise ConfigError(
            "the checkpoint's config.json lacks num_experts, num_experts_per_tok or moe_intermediate_size; it does not "
            f"describe a {config.get('model_type')}"
        )
    return {
        "num_moe_experts": num_experts_of(config),
        "moe_router_topk": int(config["num_experts_per_tok"]),
        "moe_ffn_hidden_size": int(config["moe_intermediate_size"]),
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
        "moe_router_score_function": "softmax",
        "moe_router_topk_scaling_factor": None,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_router_enable_expert_bias": False,
        "moe_router_dtype": None,
        "moe_shared_expert_intermediate_size": None,
        "moe_shared_expert_gate": False,
        "moe_layer_freq": 1,
    }
