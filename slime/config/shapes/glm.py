"""Megatron's settings of GLM-4 and of GLM-4.5 to 4.7, from their HF config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.core.errors import ConfigError


def glm4(config: Mapping[str, Any]) -> dict[str, Any]:
    """GLM-4: half of each head is rotated, in interleaved pairs; biases on q, k and v."""
    return {
        "add_qkv_bias": bool(config.get("attention_bias", True)),
        "rotary_percent": _rotary_percent(config),
        "rotary_interleaved": True,
    }


def glm4_moe(config: Mapping[str, Any]) -> dict[str, Any]:
    """GLM-4.5 to 4.7: sigmoid router with a correction bias, in float32; shared experts. Raises `ConfigError`."""
    if config.get("tie_word_embeddings"):
        raise ConfigError("got a glm4_moe with tie_word_embeddings, which SGLang 0.5.16 does not serve; untie it")
    shared, size = int(config.get("n_shared_experts") or 0), int(config["moe_intermediate_size"])
    return {
        "add_qkv_bias": bool(config.get("attention_bias", False)),
        "qk_layernorm": bool(config.get("use_qk_norm", False)),
        "rotary_percent": _rotary_percent(config),
        "num_moe_experts": int(config["n_routed_experts"]),
        "moe_router_topk": int(config["num_experts_per_tok"]),
        "moe_ffn_hidden_size": size,
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": not config.get("norm_topk_prob", True),
        "moe_router_topk_scaling_factor": float(config.get("routed_scaling_factor") or 1.0),
        "moe_router_num_groups": int(config.get("n_group") or 1),
        "moe_router_group_topk": int(config.get("topk_group") or 1),
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": shared * size or None,
        "moe_shared_expert_gate": False,
        "moe_layer_freq": 1,
    }


def _rotary_percent(config: Mapping[str, Any]) -> float:
    """The rotated part of a head, in the spelling of transformers 4 or 5."""
    parameters = config.get("rope_parameters") or {}
    return float(parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 0.5)
