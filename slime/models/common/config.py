"""Derives Megatron settings from a checkpoint's config.json: decoder settings, unsupported features, routed experts.

A family returns the settings that differ and raises `ConfigError` if it cannot train a config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slime.core.errors import ConfigError
from slime.core.hf_config import HfConfig, num_experts_of

if TYPE_CHECKING:
    from slime.models.family import Family

_FALLBACK_THETA = 10000.0


def rope_of(config: HfConfig) -> tuple[float, dict[str, Any] | None]:
    """Reads (theta, scaling object or None) from a transformers 4 or 5 config."""
    parameters: HfConfig = config.get("rope_parameters") or {}
    theta = parameters.get("rope_theta", config.get("rope_theta", _FALLBACK_THETA))
    scaling = config.get("rope_scaling") or {k: v for k, v in parameters.items() if k != "rope_theta"}
    return float(theta), dict(scaling) if scaling and rope_kind(scaling) != "default" else None


def rope_kind(scaling: Mapping[str, Any] | None) -> str:
    """Returns the type of rotary scaling from a transformers 4 or 5 config; "default" if there is none."""
    return str((scaling or {}).get("rope_type") or (scaling or {}).get("type") or "default")


def is_sparse(config: HfConfig, layer: int) -> bool:
    if not num_experts_of(config):
        return False
    if kinds := config.get("mlp_layer_types"):
        return bool(kinds[layer] == "sparse")
    if layer < int(config.get("first_k_dense_replace") or 0) or layer in (config.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % int(config.get("decoder_sparse_step") or 1) == 0


def rotary_percent(config: HfConfig, default: float) -> float:
    """Returns the fraction of each head that is rotated, from a transformers 4 or 5 config."""
    parameters: HfConfig = config.get("rope_parameters") or {}
    return float(parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or default)


ROPE_KINDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("original_max_position_embeddings",),
}
"""The types of rotary scaling that `common.rotary` supports, with the config keys that each requires."""


def decoder_architecture(config: HfConfig) -> dict[str, Any]:
    """Returns Megatron settings for a pre-norm decoder with grouped-query attention, gated MLPs and no biases."""
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    theta, scaling = rope_of(config)
    return {
        "num_layers": int(config["num_hidden_layers"]),
        "hidden_size": hidden,
        "ffn_hidden_size": int(config.get("intermediate_size") or config["moe_intermediate_size"]),
        "num_attention_heads": heads,
        "num_query_groups": kv_heads,
        "group_query_attention": kv_heads != heads,
        "kv_channels": int(config.get("head_dim") or hidden // heads),
        "vocab_size": int(config["vocab_size"]),
        "max_position_embeddings": int(config.get("max_position_embeddings") or 4096),
        "layernorm_epsilon": float(config["rms_norm_eps"]),
        "rotary_base": theta,
        "rope_scaling": scaling,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "num_moe_experts": None,
        "qk_layernorm": False,
        "multi_latent_attention": False,
        "add_qkv_bias": False,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "layernorm_zero_centered_gamma": False,
        "attention_output_gate": False,
        "experimental_attention_variant": None,
    }


def refuse_unsupported(family: Family, config: HfConfig) -> None:
    """Raises `ConfigError` if the config uses a feature that the family does not support."""
    if config.get("use_sliding_window"):
        raise ConfigError("the checkpoint has use_sliding_window, which this release does not support")
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"the checkpoint has hidden_act {config['hidden_act']!r}; slime supports only silu")
    if biases := [name for name in family.refused_biases if config.get(name)]:
        raise ConfigError(f"the checkpoint has {' and '.join(biases)}, which this release does not support")
    _refuse_scaling(family, config)
    model_type = config.get("model_type")
    if kinds := sorted(set(config.get("layer_types") or ()) - set(family.layer_kinds)):
        raise ConfigError(
            f"{model_type} has layers of type {', '.join(kinds)}; slime supports {', '.join(family.layer_kinds)}"
        )
    for name in family.per_layer:
        if config.get(name) and len(config[name]) < int(config.get("num_hidden_layers") or 0):
            raise ConfigError(
                f"config.json has {len(config[name])} {name} for {config['num_hidden_layers']} layers; fix config.json"
            )


def _refuse_scaling(family: Family, config: HfConfig) -> None:
    scaling = rope_of(config)[1] or {}
    kind = rope_kind(scaling)
    if kind not in family.rope_kinds:
        raise ConfigError(
            f"{config.get('model_type')} has unsupported rotary scaling {kind!r}; slime supports "
            f"{', '.join(family.rope_kinds)}"
        )
    if missing := [name for name in ROPE_KINDS.get(kind, ()) if not scaling.get(name)]:
        raise ConfigError(f"rotary scaling {kind!r} lacks {', '.join(missing)}; add it to config.json")


def softmax_experts(config: HfConfig) -> dict[str, Any]:
    """Returns Megatron settings for a softmax router and its experts. Raises `ConfigError` if a size is missing."""
    if not num_experts_of(config) or not config.get("moe_intermediate_size") or not config.get("num_experts_per_tok"):
        raise ConfigError(
            "the checkpoint's config.json must have num_experts, num_experts_per_tok and moe_intermediate_size to "
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
    """Returns Megatron settings for a sigmoid router with bias and groups, and its routed and shared experts."""
    if config.get("scoring_func", "sigmoid") != "sigmoid" or config.get("topk_method", "noaux_tc") != "noaux_tc":
        raise ConfigError(
            f"the router has scoring_func {config.get('scoring_func')} and topk_method "
            f"{config.get('topk_method')}; slime supports only sigmoid and noaux_tc"
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
