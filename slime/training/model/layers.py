"""Megatron's local layer specification with what it lacks without Transformer Engine: a norm and packed attention.

`RMSNorm` does what `transformers` does (float32 statistics, weight in the model's dtype) and allows sequence
parallelism, which Megatron's wrapper of `torch.nn.RMSNorm` refuses.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.core.errors import ConfigError
from slime.training.model.attention import PackedAttention, PackedSequences
from slime.training.model.moe import ExpertLayer, check_moe

__all__ = ["PackedSequences", "RMSNorm", "decoder_spec"]


class RMSNorm(torch.nn.Module):
    """Root mean square norm over the last dimension (Zhang and Sennrich 2019), in the arithmetic of `transformers`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        super().__init__()
        if config.layernorm_zero_centered_gamma:
            raise ConfigError("got layernorm_zero_centered_gamma, because no supported family has it; leave it out")
        device = torch.device("cpu") if config.use_cpu_initialization else _current_device()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # Under sequence parallelism each rank sees a part of the tokens: Megatron sums such gradients over the ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H] in the dtype of `x`."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def _current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


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
