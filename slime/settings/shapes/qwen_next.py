"""Qwen3-Next, Qwen3.5 and 3.6: linear attention (gated delta net), and full attention with a gate every few layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.core.errors import ConfigError
from slime.settings.shapes.qwen import softmax_experts

MODEL_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Of the language models: what lies under `text_config` in a multimodal one."""

SIZES = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
"""Of linear attention, after `linear_`, in HF's and in Megatron's configuration."""


def qwen_next(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dense or with routed and shared experts. Raises `ConfigError` for what this release does not train."""
    sizes = {f"linear_{name}": int(config[f"linear_{name}"]) for name in SIZES}
    keys, values = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
    if values % keys:
        raise ConfigError(f"got {keys} key heads for {values} value heads of linear attention; they must divide evenly")
    gates = (None, "silu", "swish")
    trained = {"attention_bias": (None, False), "attn_output_gate": (None, True), "output_gate_type": gates}
    for name, allowed in trained.items():
        if config.get(name) not in allowed:
            raise ConfigError(f"got a checkpoint with {name} {config[name]}, which this release does not train")
    parameters = config.get("rope_parameters") or {}
    rotated = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.25))
    shape = {
        **sizes,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(is_linear(config, layer)) for layer in range(int(config["num_hidden_layers"]))],
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
        "attention_output_gate": True,
        "rotary_percent": float(rotated),
    }
    if not config.get("num_experts"):
        return shape
    return {
        **shape,
        **softmax_experts({"norm_topk_prob": True, **config}),
        "moe_shared_expert_intermediate_size": int(config["shared_expert_intermediate_size"]),
        "moe_shared_expert_gate": True,
    }


def is_linear(config: Mapping[str, Any], layer: int) -> bool:
    """Whether the layer's attention is linear; the others have full attention. False for families without any."""
    if kinds := config.get("layer_types"):
        return bool(kinds[layer] == "linear_attention")
    if not config.get("linear_num_key_heads"):
        return False
    return (layer + 1) % int(config.get("full_attention_interval") or 4) != 0
