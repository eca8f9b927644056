"""Megatron's attention with what it lacks without Transformer Engine: packed rows, and our norm of q and k."""

from __future__ import annotations

import dataclasses

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.models.common.attention import PackedAttention, RotatingAttention
from slime.models.common.norm import RMSNorm


def packed_attention(config: TransformerConfig, standard: ModuleSpec, module: type | None = None) -> ModuleSpec:
    """`standard`, Megatron's local attention, with a packed core; `module` is a class of its own, if it needs one.

    A class that derives from `RotatingAttention` has the ops of this device. One that derives from Megatron's
    `SelfAttention` alone works as well, with Megatron's rotary embedding, a loop over the sequences in every layer.
    """
    parts = dataclasses.replace(standard.submodules, core_attention=PackedAttention)
    if config.qk_layernorm:
        parts.q_layernorm = parts.k_layernorm = RMSNorm
    return ModuleSpec(module=module or RotatingAttention, params=standard.params, submodules=parts)


def rotates_by_megatron(attention: object) -> bool:
    """Whether the attention module of a layer is Megatron's own or derives from it alone: it wants its table."""
    module = attention.module if isinstance(attention, ModuleSpec) else attention
    return isinstance(module, type) and issubclass(module, SelfAttention) and not issubclass(module, RotatingAttention)
