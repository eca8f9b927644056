"""Megatron's decoder of a family's modules: its local layer specification with our norms, layer by layer."""

from __future__ import annotations

import dataclasses

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.core.errors import ConfigError
from slime.core.hf_config import HfConfig
from slime.models import Family
from slime.models.common.mlp import RoutedLayer
from slime.models.common.packed_attention import RMSNorm


def decoder_spec(family: Family, config: TransformerConfig, hf_config: HfConfig) -> TransformerBlockSubmodules:
    """One specification per layer: pre-norm, with the attention and the MLP or experts that the family names."""

    def layer(number: int) -> ModuleSpec:
        spec = _layer(family, config, hf_config, number)
        module = RoutedLayer if config.num_moe_experts else family.layer(hf_config, number)
        return spec if module is None else dataclasses.replace(spec, module=module)

    return TransformerBlockSubmodules(
        layer_specs=[layer(number) for number in range(config.num_layers)], layer_norm=RMSNorm
    )


def mtp_layer_spec(family: Family, config: TransformerConfig, hf_config: HfConfig) -> ModuleSpec:
    """The layer of multi-token prediction, whose router chooses by itself: engines record no choice of their draft.

    Raises `ConfigError` where the checkpoint has none that is trained.
    """
    mtp = family.mtp_config(hf_config)
    if mtp is None:
        raise ConfigError(
            f"got --enable-mtp-training for a {hf_config.get('model_type')} without a layer of multi-token prediction "
            "that is trained; leave the flag out"
        )
    return _layer(family, config, mtp, 0)


def _layer(family: Family, config: TransformerConfig, hf_config: HfConfig, number: int) -> ModuleSpec:
    base = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    parts = dataclasses.replace(
        base.submodules,
        input_layernorm=RMSNorm,
        pre_mlp_layernorm=RMSNorm,
        self_attention=family.attention(config, hf_config, number, base.submodules.self_attention),
        mlp=family.mlp(config, hf_config, number, base.submodules.mlp),
    )
    return ModuleSpec(module=base.module, submodules=parts)
