"""Megatron's local layer specification with what it lacks without Transformer Engine: a norm and packed attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.settings.model_shape import is_sparse
from slime.settings.shapes.qwen_next import is_linear
from slime.training.model.attention import PackedAttention, PackedSequences
from slime.training.model.families.gated_attention import GatedAttention
from slime.training.model.families.gated_delta import GatedDeltaNet
from slime.training.model.families.latent_attention import LatentAttention
from slime.training.model.families.sandwich import NormedAttention, NormedMLP
from slime.training.model.moe import ExpertLayer
from slime.training.model.norm import RMSNorm

__all__ = ["PackedSequences", "RMSNorm", "decoder_spec"]


def decoder_spec(config: TransformerConfig, hf_config: Mapping[str, Any]) -> TransformerBlockSubmodules:
    """One specification per layer: Megatron's local one with our norms, an attention module and an MLP or experts."""
    base = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")

    def layer(number: int) -> ModuleSpec:
        parts = dataclasses.replace(
            base.submodules,
            input_layernorm=RMSNorm,
            pre_mlp_layernorm=RMSNorm,
            self_attention=_attention(config, hf_config, number, base.submodules.self_attention),
        )
        if is_sparse(hf_config, number):
            parts.mlp = ExpertLayer
        elif hf_config["model_type"] == "glm4":
            parts.mlp = NormedMLP
        return ModuleSpec(module=base.module, submodules=parts)

    return TransformerBlockSubmodules(
        layer_specs=[layer(number) for number in range(config.num_layers)], layer_norm=RMSNorm
    )


def _attention(
    config: TransformerConfig, hf_config: Mapping[str, Any], number: int, standard: ModuleSpec
) -> ModuleSpec:
    """The attention module of layer `number`: Megatron's own with a packed core unless the family has another."""
    if hf_config.get("kv_lora_rank"):
        return ModuleSpec(module=LatentAttention, params={"hf_config": hf_config})
    parts = dataclasses.replace(standard.submodules, core_attention=PackedAttention)
    if config.qk_layernorm:
        parts.q_layernorm = parts.k_layernorm = RMSNorm
    if is_linear(hf_config, number):
        return ModuleSpec(module=GatedDeltaNet, params={"hf_config": hf_config})
    if hf_config["model_type"] == "glm4":
        return ModuleSpec(module=NormedAttention, params=standard.params, submodules=parts)
    module = GatedAttention if config.attention_output_gate else standard.module
    return ModuleSpec(module=module, params=standard.params, submodules=parts)
