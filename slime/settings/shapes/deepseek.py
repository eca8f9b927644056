"""Models with latent attention: DeepSeek-V3 (V3.1, R1), GLM-4.7-Flash, and GLM-5 with its sparse-attention indexer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.core.errors import ConfigError
from slime.settings.model_shape import is_sparse


def shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's settings of latent attention and of its experts. Raises `ConfigError` for what is not trained."""
    needed = (
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "moe_intermediate_size",
        "n_routed_experts",
        "num_experts_per_tok",
    )
    if missing := [name for name in needed if not config.get(name)]:
        raise ConfigError(
            f"the checkpoint's config.json lacks {', '.join(missing)}; models with latent attention and "
            "experts have them"
        )
    if config.get("attention_bias"):
        raise ConfigError("got a checkpoint with attention_bias, which latent attention in the engine lacks")
    if indexer_kinds(config) and (not config.get("q_lora_rank") or config.get("index_k_norm_type", "layer") != "layer"):
        raise ConfigError(
            "got a sparse-attention indexer without q_lora_rank, or with a norm of keys that is no "
            "layer norm; neither is trained"
        )
    if always := [name for name in ("index_init_tokens", "index_local_tokens") if config.get(name)]:
        raise ConfigError(
            f"got a sparse-attention indexer with {', '.join(always)}: the engine always chooses these "
            "keys, the trainer does not; such a checkpoint is not trained"
        )
    heads, nope, rope = (int(config[n]) for n in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    return {
        "multi_latent_attention": True,
        "q_lora_rank": config.get("q_lora_rank"),
        "kv_lora_rank": int(config["kv_lora_rank"]),
        "qk_head_dim": nope,
        "qk_pos_emb_head_dim": rope,
        "v_head_dim": int(config["v_head_dim"]),
        "kv_channels": nope + rope,
        "num_query_groups": heads,
        "group_query_attention": False,
        "qk_layernorm": True,
        **sigmoid_experts(config),
    }


def sigmoid_experts(config: Mapping[str, Any]) -> dict[str, Any]:
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


def indexer_kinds(config: Mapping[str, Any]) -> list[str]:
    """Of each layer "full" (it chooses keys) or "shared" (it uses the choice before it); empty without an indexer."""
    if not config.get("index_topk"):
        return []
    num_layers = int(config["num_hidden_layers"])
    if kinds := config.get("indexer_types"):
        return list(kinds)
    if pattern := config.get("index_topk_pattern"):
        names = {"F": "full", "S": "shared"}
        return [names.get(kind, kind) for kind in pattern]
    every, offset = max(int(config.get("index_topk_freq") or 1), 1), int(config.get("index_skip_topk_offset") or 2)
    return ["shared" if max(layer - offset + 1, 0) % every else "full" for layer in range(num_layers)]
