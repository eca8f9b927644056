"""Megatron's local layer specification with what it lacks without Transformer Engine: a norm and packed attention."""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.training.model.attention import PackedAttention, PackedSequences
from slime.training.model.moe import ExpertLayer, check_moe
from slime.training.model.norm import RMSNorm

__all__ = ["PackedSequences", "RMSNorm", "decoder_spec"]


def decoder_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Megatron's local layer specification with our norm and attention in place of its own, for each layer.

    Every layer has experts if the configuration names any. Raises `ConfigError` for settings of experts that cannot be
    trained.
    """
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = RMSNorm
    parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if config.num_moe_experts:
        check_moe(config)
        parts.mlp = ExpertLayer
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=RMSNorm)
