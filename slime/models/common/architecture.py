"""From a checkpoint's config.json to Megatron's settings: what decoders have in common, and what none may ask for.

A family returns the settings in which it departs, and raises `ConfigError` for what cannot be trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slime.core.errors import ConfigError
from slime.core.hf_config import HfConfig
from slime.models.common.hf_config import rope_kind, rope_of

if TYPE_CHECKING:
    from slime.models.family import Family

ROPE_KINDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("original_max_position_embeddings",),
}
"""Rotary scalings that `common.rotary` computes -> what they need."""


def decoder_architecture(config: HfConfig) -> dict[str, Any]:
    """Megatron settings of a pre-norm decoder with grouped-query attention, gated MLPs and no biases."""
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
    """Raises `ConfigError` for what a config may ask for and the family does not train."""
    if config.get("use_sliding_window"):
        raise ConfigError("got a checkpoint with use_sliding_window, which this release does not train")
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"got a checkpoint with hidden_act {config['hidden_act']!r}; this release trains silu")
    if biases := [name for name in family.refused_biases if config.get(name)]:
        raise ConfigError(f"got a checkpoint with {' and '.join(biases)}, which this release does not train")
    _refuse_scaling(family, config)
    model_type = config.get("model_type")
    if kinds := sorted(set(config.get("layer_types") or ()) - set(family.layer_kinds)):
        raise ConfigError(
            f"got layers of type {', '.join(kinds)} in a {model_type}; this release trains "
            f"{', '.join(family.layer_kinds)}"
        )
    for name in family.per_layer:
        if config.get(name) and len(config[name]) < int(config.get("num_hidden_layers") or 0):
            raise ConfigError(f"got {len(config[name])} {name} for {config['num_hidden_layers']} layers in config.json")


def _refuse_scaling(family: Family, config: HfConfig) -> None:
    scaling = rope_of(config)[1] or {}
    kind = rope_kind(scaling)
    if kind not in family.rope_kinds:
        raise ConfigError(
            f"got a {config.get('model_type')} with rotary scaling {kind!r}; this release trains "
            f"{', '.join(family.rope_kinds)} for it"
        )
    if missing := [name for name in ROPE_KINDS.get(kind, ()) if not scaling.get(name)]:
        raise ConfigError(f"got rotary scaling {kind!r} without {', '.join(missing)}; complete config.json")
