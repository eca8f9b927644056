"""Qwen3 (head norms of q and k; dense or with experts) and its predecessor Qwen2 (biases on q, k, v; no head norms)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.settings.model_shape import is_sparse
from slime.weights.tables.decoder import attention, decoder_table, experts, mlp, pre_norm
from slime.weights.tables.table import FamilyTable


def qwen3_table(hf_config: Mapping[str, Any]) -> FamilyTable:
    """Rows of a Qwen3, dense or with experts in all or some layers."""
    bias = bool(hf_config.get("attention_bias", False))
    return decoder_table(
        str(hf_config["model_type"]),
        hf_config,
        lambda s, layer: pre_norm(
            s.hidden_size,
            attention(s, qkv_bias=bias, out_bias=bias, qk_norm=True),
            experts(s) if is_sparse(hf_config, layer) else mlp(s.hidden_size, s.intermediate_size),
        ),
    )


def qwen2_table(hf_config: Mapping[str, Any]) -> FamilyTable:
    """Rows of a dense Qwen2 or Qwen2.5: biases on q, k and v are part of the architecture, not of the config."""
    return decoder_table(
        "qwen2",
        hf_config,
        lambda s, _: pre_norm(s.hidden_size, attention(s, qkv_bias=True), mlp(s.hidden_size, s.intermediate_size)),
    )
