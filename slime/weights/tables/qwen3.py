"""Qwen3 (head norms of q and k; dense or with experts) and its predecessor Qwen2 (biases on q, k, v; no head norms)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.weights.tables.llama import decoder_table, expert_rows
from slime.weights.tables.table import FamilyTable


def qwen3_table(hf_config: Mapping[str, Any]) -> FamilyTable:
    """Rows of a dense Qwen3."""
    bias = bool(hf_config.get("attention_bias", False))
    return decoder_table("qwen3", hf_config, qkv_bias=bias, out_bias=bias, qk_norm=True)


def qwen3_moe_table(hf_config: Mapping[str, Any]) -> FamilyTable:
    """Rows of a Qwen3 whose layers all have experts."""
    return decoder_table("qwen3_moe", hf_config, qk_norm=True, mlp=expert_rows())


def qwen2_table(hf_config: Mapping[str, Any]) -> FamilyTable:
    """Rows of a dense Qwen2 or Qwen2.5: biases on q, k and v are part of the architecture, not of the config."""
    return decoder_table("qwen2", hf_config, qkv_bias=True)
