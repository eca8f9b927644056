"""QK norms over all heads of a token, applied before the rotation (MiniMax-M2, `qk_norm_type: per_layer`).

Heads are split over tensor-parallel ranks, so the sum of squares is reduced over ranks, forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.models.common.packed_attention import PackedSequences, RotatingAttention, current_device
from slime.ops.norm import rms_norm
from slime.ops.qk_rotary import rotate


class WholeNorm(torch.nn.Module):
    """An RMS norm over all heads, which are split over tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, size: int) -> None:
        """`size`: number of entries on this rank."""
        super().__init__()
        device = torch.device("cpu") if config.use_cpu_initialization else current_device()
        self.eps, self.tp_size = config.layernorm_epsilon, config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        """[T, heads, d] of this rank -> normed [T, heads, d]."""
        flat = x.flatten(1)
        if self.tp_size == 1:
            return rms_norm(flat, self.weight, self.eps).view_as(x)
        wide = flat.float()
        squares = wide.square().sum(-1, keepdim=True)
        whole = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        normed = wide * torch.rsqrt(whole / (self.tp_size * flat.size(-1)) + self.eps)
        return (self.weight * normed.to(x.dtype)).view_as(x)


class WholeNormedAttention(RotatingAttention):
    """Attention with QK norms over all heads. The rotation is plain PyTorch.

    The norms are not named `q_layernorm` and `k_layernorm`, because Megatron treats weights with these names as
    replicated and sums their gradients over tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, *given: Any, **named: Any) -> None:
        super().__init__(config, *given, **named)
        size, groups = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
        self.q_layernorm = self.k_layernorm = None
        self.q_norm = WholeNorm(config, self.num_attention_heads_per_partition * size)
        self.k_norm = WholeNorm(config, groups * size)

    def rotated(self, hidden_states: Tensor, packed: PackedSequences) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """[T_local, 1, H] -> query [T, heads, d], key and value [T, groups, d], and no gate."""
        assert packed.rotary is not None, "the model computes cos and sin before its first layer"
        mixed = self.linear_qkv(hidden_states)[0].squeeze(1)
        heads = mixed.unflatten(-1, (self.num_query_groups_per_partition, -1, self.hidden_size_per_attention_head))
        query, key, value = heads.split([heads.size(-2) - 2, 1, 1], dim=-2)
        normed = self.q_norm(query.flatten(1, 2)), self.k_norm(key.squeeze(-2))
        query, key = (rotate(x, *packed.rotary, interleaved=self.config.rotary_interleaved) for x in normed)
        return query, key, value.squeeze(-2), None
