"""Megatron's settings of routed experts, from the HF config: the two kinds of router that families have."""

from __future__ import annotations

from typing import Any

from slime.core.errors import ConfigError
from slime.core.hf_config import HfConfig, num_experts_of
from slime.models.common.hf_config import is_sparse


def softmax_experts(config: HfConfig) -> dict[str, Any]:
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


def sigmoid_experts(config: HfConfig) -> dict[str, Any]:
    """Megatron's settings of a sigmoid router with bias and groups, of its experts and the shared ones."""
    if config.get("scoring_func", "sigmoid") != "sigmoid" or config.get("topk_method", "noaux_tc") != "noaux_tc":
        raise ConfigError(
            f"got a router with scoring_func {config.get('scoring_func')} and topk_method "
            f"{config.get('topk_method')}; this release trains sigmoid and noaux_tc"
        )
    size = int(config["moe_intermediate_size"])
    shared = int(config.get("n_shared_experts") or 0) * size
    return {
        "num_moe_experts": int(config["n_routed_experts"]),
        "moe_router_topk": int(config["num_experts_per_tok"]),
        "moe_ffn_hidden_size": size,
        "moe_shared_expert_intermediate_size": shared or None,
        "moe_shared_expert_gate": False,
        "moe_layer_freq": [int(is_sparse(config, layer)) for layer in range(int(config["num_hidden_layers"]))],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_pre_softmax": not config.get("norm_topk_prob", True),
        "moe_router_topk_scaling_factor": float(config.get("routed_scaling_factor") or 1.0),
        "moe_router_num_groups": int(config.get("n_group") or 1),
        "moe_router_group_topk": int(config.get("topk_group") or 1),
        "moe_router_dtype": "fp32",
    }
