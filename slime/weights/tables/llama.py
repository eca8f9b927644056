"""Llama and what has its layout (SmolLM2): pre-norm, grouped-query attention, gated MLP, optional biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.weights.tables.decoder import attention, decoder_table, mlp, pre_norm
from slime.weights.tables.table import FamilyTable


def llama_table(hf_config: Mapping[str, Any]) -> FamilyTable:
    """Rows of a Llama-like model; `attention_bias` and `mlp_bias` as in its config."""
    bias, mlp_bias = (bool(hf_config.get(name, False)) for name in ("attention_bias", "mlp_bias"))
    return decoder_table(
        str(hf_config["model_type"]),
        hf_config,
        lambda s, _: pre_norm(
            s.hidden_size,
            attention(s, qkv_bias=bias, out_bias=bias),
            mlp(s.hidden_size, s.intermediate_size, bias=mlp_bias),
        ),
    )
