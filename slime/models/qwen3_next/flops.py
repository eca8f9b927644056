"""Multiply-adds of gated delta nets and of gated attention."""

from __future__ import annotations

import dataclasses

from slime.core.hf_config import HfConfig
from slime.models.common.flops import AttentionCost, grouped_query_cost, head_sizes
from slime.models.qwen3_next.linear import is_linear


def mixer_cost(config: HfConfig, layer: int) -> AttentionCost:
    """Of one layer: linear attention, or full attention, whose heads have a gate each."""
    if is_linear(config, layer):
        return AttentionCost(_delta_net(config))
    plain = grouped_query_cost(config, layer)
    heads, _, head_dim = head_sizes(config)
    return dataclasses.replace(plain, per_token=plain.per_token + int(config["hidden_size"]) * head_dim * heads)


def _delta_net(config: HfConfig) -> int:
    """Per token: projections, convolution and recurrence (S k, the outer product and S q for each value head; in chunks
    it takes more, and is faster)."""
    key_heads, value_heads = int(config["linear_num_key_heads"]), int(config["linear_num_value_heads"])
    key_dim, value_dim = int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"])
    qkv = 2 * key_heads * key_dim + value_heads * value_dim
    projections = int(config["hidden_size"]) * (qkv + 2 * value_heads * (value_dim + 1))
    return projections + qkv * int(config["linear_conv_kernel_dim"]) + 3 * value_heads * key_dim * value_dim
