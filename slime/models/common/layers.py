"""Megatron's attention with what it lacks without Transformer Engine: packed rows, and our norm of q and k."""

from __future__ import annotations

import dataclasses

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.models.common.attention import PackedAttention
from slime.models.common.norm import RMSNorm


def packed_attention(config: TransformerConfig, standard: ModuleSpec, module: type | None = None) -> ModuleSpec:
    """`standard`, Megatron's local attention, with a packed core; its class may give way to `module`."""
    parts = dataclasses.replace(standard.submodules, core_attention=PackedAttention)
    if config.qk_layernorm:
        parts.q_layernorm = parts.k_layernorm = RMSNorm
    return ModuleSpec(module=module or standard.module, params=standard.params, submodules=parts)
