"""Qwen3 (dense; per-head norms of q and k) and its predecessor Qwen2 (biases on q, k, v; no head norms)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.weights.tables.llama import dense_table
from slime.weights.tables.table import FamilyTable


def qwen3_table(hf_config: Mapping[str, Any]) -> FamilyTable:
    """Rows of a dense Qwen3."""
    bias = bool(hf_config.get("attention_bias", False))
    return dense_table("qwen3", hf_config, qkv_bias=bias, out_bias=bias, qk_norm=True)


def qwen2_table(hf_config: Mapping[str, Any]) -> FamilyTable:
    """Rows of a dense Qwen2 or Qwen2.5: biases on q, k and v are part of the architecture, not of the config."""
    return dense_table("qwen2", hf_config, qkv_bias=True)
