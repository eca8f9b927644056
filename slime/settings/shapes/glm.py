"""Megatron's settings of GLM-4 and of GLM-4.5 to 4.7, from their HF config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.core.errors import ConfigError
from slime.settings.shapes.deepseek import sigmoid_experts


def glm4(config: Mapping[str, Any]) -> dict[str, Any]:
    """GLM-4: half of each head is rotated, in interleaved pairs; biases on q, k and v."""
    return {
        "add_qkv_bias": bool(config.get("attention_bias", True)),
        "rotary_percent": _rotary_percent(config),
        "rotary_interleaved": True,
    }


def glm4_moe(config: Mapping[str, Any]) -> dict[str, Any]:
    """GLM-4.5 to 4.7: half of each head is rotated; experts as in DeepSeek-V3. Raises `ConfigError`."""
    if config.get("tie_word_embeddings"):
        raise ConfigError("got a glm4_moe with tie_word_embeddings, which the engine would serve untied; untie it")
    return {
        "add_qkv_bias": bool(config.get("attention_bias", False)),
        "qk_layernorm": bool(config.get("use_qk_norm", False)),
        "rotary_percent": _rotary_percent(config),
        **sigmoid_experts(config),
    }


def _rotary_percent(config: Mapping[str, Any]) -> float:
    """The rotated part of a head, in the spelling of transformers 4 or 5."""
    parameters = config.get("rope_parameters") or {}
    return float(parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 0.5)
