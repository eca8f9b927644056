"""The model's shape, from `<hf_checkpoint>/config.json` to Megatron's names.

A Megatron flag that contradicts the checkpoint is refused: it would train another model than the one that is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.core.errors import ConfigError

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""`model_type` values that this release trains."""

ROPE_KINDS = ("default", "linear", "llama3")
"""Rotary scalings that this release trains: the attention scale stays 1, whatever the sequence length."""

_FALLBACK_THETA = 10000.0


def read_hf_config(hf_checkpoint: str) -> dict[str, Any]:
    """The checkpoint's config.json. Raises `ConfigError` if the folder or the file is missing or damaged."""
    path = Path(hf_checkpoint) / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"got --hf-checkpoint {hf_checkpoint}, but {path} does not exist; give a local folder in HF format "
            "(a hub name is not downloaded)"
        )
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"got {path}, which is not JSON ({error}); fetch the checkpoint again") from error
    if not isinstance(config, dict):
        raise ConfigError(f"got {path}, which holds no JSON object; fetch the checkpoint again")
    return config


def rope_of(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling object or None), from the spelling of transformers 4 or 5."""
    parameters = config.get("rope_parameters") or {}
    theta = parameters.get("rope_theta", config.get("rope_theta", _FALLBACK_THETA))
    scaling = config.get("rope_scaling") or {k: v for k, v in parameters.items() if k != "rope_theta"}
    return float(theta), dict(scaling) if scaling and rope_kind(scaling) != "default" else None


def rope_kind(scaling: Mapping[str, Any] | None) -> str:
    """The kind of a scaling object, in either spelling; "default" for none."""
    return str((scaling or {}).get("rope_type") or (scaling or {}).get("type") or "default")


def megatron_shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """HF config -> Megatron settings by field name. Raises `ConfigError` for an unknown family or a missing key."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"got a checkpoint of model_type {family!r}; this release trains {', '.join(FAMILIES)}")
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        num_layers, ffn, vocab = config["num_hidden_layers"], config["intermediate_size"], config["vocab_size"]
    except KeyError as missing:
        raise ConfigError(f"the checkpoint's config.json lacks {missing}; it does not describe a {family}") from missing
    _refuse_unsupported(config, str(family))
    kv_heads = int(config.get("num_key_value_heads") or heads)
    theta, scaling = rope_of(config)
    return {
        "num_layers": int(num_layers),
        "hidden_size": hidden,
        "ffn_hidden_size": int(ffn),
        "num_attention_heads": heads,
        "num_query_groups": kv_heads,
        "group_query_attention": kv_heads != heads,
        "kv_channels": int(config.get("head_dim") or hidden // heads),
        "vocab_size": int(vocab),
        "max_position_embeddings": int(config.get("max_position_embeddings") or 4096),
        "layernorm_epsilon": float(config.get("rms_norm_eps", 1e-6)),
        "rotary_base": theta,
        "rope_scaling": scaling,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "qk_layernorm": family in ("qwen3", "qwen3_moe"),
        "add_qkv_bias": family == "qwen2",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        **(_expert_shape(config) if family == "qwen3_moe" else {}),
    }


def num_experts_of(config: Mapping[str, Any]) -> int:
    """Routed experts of each layer, under the name that the family gives them; 0 for a dense model."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return next((int(config[name]) for name in names if config.get(name)), 0)


def is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    """Whether this layer has routed experts."""
    if not num_experts_of(config):
        return False
    if kinds := config.get("mlp_layer_types"):
        return bool(kinds[layer] == "sparse")
    if layer < int(config.get("first_k_dense_replace") or 0) or layer in (config.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % int(config.get("decoder_sparse_step") or 1) == 0


def _expert_shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's settings of routed experts. Raises `ConfigError` for what this release does not train."""
    if int(config.get("decoder_sparse_step") or 1) != 1 or config.get("mlp_only_layers"):
        raise ConfigError(
            f"got a checkpoint with decoder_sparse_step {config.get('decoder_sparse_step')} and mlp_only_layers "
            f"{config.get('mlp_only_layers')}; this release trains models whose layers all have experts"
        )
    if not num_experts_of(config) or not config.get("moe_intermediate_size") or not config.get("num_experts_per_tok"):
        raise ConfigError(
            "the checkpoint's config.json lacks num_experts, num_experts_per_tok or moe_intermediate_size; it does not "
            "describe a qwen3_moe"
        )
    return {
        "num_moe_experts": num_experts_of(config),
        "moe_router_topk": int(config["num_experts_per_tok"]),
        "moe_ffn_hidden_size": int(config["moe_intermediate_size"]),
        # Softmax over the chosen experts equals softmax over all, chosen and normalised.
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
        "moe_router_score_function": "softmax",
        "moe_router_topk_scaling_factor": None,
        "moe_shared_expert_intermediate_size": None,
        "moe_layer_freq": 1,
    }


def _refuse_unsupported(config: Mapping[str, Any], family: str) -> None:
    """Raises `ConfigError` for what a family may have and this release does not train."""
    if config.get("use_sliding_window"):
        raise ConfigError("got a checkpoint with use_sliding_window, which this release does not train")
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"got a checkpoint with hidden_act {config['hidden_act']!r}; this release trains silu")
    if config.get("mlp_bias") or (config.get("attention_bias") and family != "qwen2"):
        raise ConfigError("got a checkpoint with biases in its linear layers; this release trains those of qwen2 only")
    if float(config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ConfigError("got a checkpoint with partial_rotary_factor; this release rotates whole heads")
    _, scaling = rope_of(config)
    kind = rope_kind(scaling)
    if kind not in ROPE_KINDS:
        raise ConfigError(f"got a checkpoint with rotary scaling {kind!r}; this release trains {', '.join(ROPE_KINDS)}")


def contradictions(shape: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """One message per Megatron flag whose value is not the checkpoint's. `given`: explicit settings by field name."""
    out = []
    for name, value in given.items():
        if name in shape and value != shape[name]:
            flag = "--" + name.replace("_", "-")
            out.append(
                f"got {flag} {value} because of a flag, but the checkpoint's config.json says {shape[name]}; "
                "drop the flag, the shape is read from the checkpoint"
            )
    return out
