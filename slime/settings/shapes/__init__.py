"""From a checkpoint's config.json to Megatron's settings: what families have in common, and one function per family.

A family's function returns the settings in which it departs, and raises `ConfigError` for what cannot be trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slime.core.errors import ConfigError
from slime.settings.model_shape import rope_kind, rope_of
from slime.settings.shapes import deepseek, glm, qwen, qwen_next

Config = Mapping[str, Any]

FAMILIES: Mapping[str, Callable[[Config], dict[str, Any]]] = {
    "llama": lambda _: {},
    "qwen2": qwen.qwen2,
    "qwen3": qwen.qwen3,
    "qwen3_moe": qwen.qwen3_moe,
    "glm4": glm.glm4,
    "glm4_moe": glm.glm4_moe,
    **dict.fromkeys(qwen_next.MODEL_TYPES, qwen_next.qwen_next),
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite", "glm_moe_dsa"), deepseek.shape),
}
"""`model_type` values that this release trains -> what sets them apart."""

ROPE_KINDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("original_max_position_embeddings",),
}
"""Rotary scalings that this release trains -> what they need; yarn with latent attention only."""

LAYER_KINDS = ("full_attention", "linear_attention", "deepseek_sparse_attention")
"""Of `layer_types`."""

PER_LAYER = ("layer_types", "mlp_layer_types", "indexer_types", "index_topk_pattern")
"""Lists with one entry per layer."""


def megatron_shape(config: Config) -> dict[str, Any]:
    """HF config -> Megatron settings by field name. Raises `ConfigError` for an unknown family or a missing key."""
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        raise ConfigError(f"got a checkpoint of model_type {family!r}; this release trains {', '.join(FAMILIES)}")
    _refuse_unsupported(config)
    try:
        return {**_common(config), **FAMILIES[family](config)}
    except KeyError as missing:
        raise ConfigError(f"the checkpoint's config.json lacks {missing}; it does not describe a {family}") from missing


def _common(config: Config) -> dict[str, Any]:
    """A pre-norm decoder with grouped-query attention, gated MLPs and no biases."""
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


def _refuse_unsupported(config: Config) -> None:
    """Raises `ConfigError` for what a config may ask for and this release does not train."""
    if config.get("use_sliding_window"):
        raise ConfigError("got a checkpoint with use_sliding_window, which this release does not train")
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"got a checkpoint with hidden_act {config['hidden_act']!r}; this release trains silu")
    biases = [name for name in ("mlp_bias", "attention_bias") if config.get(name)]
    if biases and config.get("model_type") in ("llama", "qwen3", "qwen3_moe"):
        raise ConfigError(f"got a checkpoint with {' and '.join(biases)}, which this release does not train")
    scaling = rope_of(config)[1] or {}
    kind = rope_kind(scaling)
    if kind not in ROPE_KINDS or (kind == "yarn" and not config.get("kv_lora_rank")):
        raise ConfigError(
            f"got a checkpoint with rotary scaling {kind!r}; this release trains {', '.join(ROPE_KINDS)} "
            "(yarn with latent attention only)"
        )
    if missing := [name for name in ROPE_KINDS[kind] if not scaling.get(name)]:
        raise ConfigError(f"got rotary scaling {kind!r} without {', '.join(missing)}; complete config.json")
    if kinds := sorted(set(config.get("layer_types") or ()) - set(LAYER_KINDS)):
        raise ConfigError(f"got layers of type {', '.join(kinds)}; this release trains {', '.join(LAYER_KINDS)}")
    for name in PER_LAYER:
        if config.get(name) and len(config[name]) < int(config.get("num_hidden_layers") or 0):
            raise ConfigError(f"got {len(config[name])} {name} for {config['num_hidden_layers']} layers in config.json")
