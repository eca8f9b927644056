"""The families that slime knows, each as one declarative table that is read in both directions.

`table_for` is the only door: it takes the `config.json` of a Hugging Face checkpoint and returns the rows for exactly
that model (biases, tied embeddings and number of layers resolved).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slime.core.errors import ConfigError
from slime.settings.shapes.qwen_next import MODEL_TYPES
from slime.weights.tables.deepseek import deepseek_table
from slime.weights.tables.glm import glm4_moe_table, glm4_table
from slime.weights.tables.llama import llama_table
from slime.weights.tables.qwen import qwen2_table, qwen3_table
from slime.weights.tables.qwen_next import qwen_next_table
from slime.weights.tables.table import Entry, FamilyTable, ModelShape, Row, Unit

FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], FamilyTable]] = {
    "llama": llama_table,
    "qwen2": qwen2_table,
    "qwen3": qwen3_table,
    "qwen3_moe": qwen3_table,
    "glm4": glm4_table,
    "glm4_moe": glm4_moe_table,
    **dict.fromkeys(MODEL_TYPES, qwen_next_table),
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite", "glm_moe_dsa"), deepseek_table),
}
"""`model_type` of a HF config -> the builder of its table."""

__all__ = ["FAMILIES", "Entry", "FamilyTable", "ModelShape", "Row", "Unit", "table_for"]


def table_for(hf_config: Mapping[str, Any]) -> FamilyTable:
    """The table of a model, from its `config.json` as a mapping. Raises `ConfigError` for families without one."""
    model_type = hf_config.get("model_type")
    builder = FAMILIES.get(str(model_type))
    if builder is None:
        raise ConfigError(
            f"got model_type={model_type!r}; slime has no weight table for it, only for {', '.join(sorted(FAMILIES))}; "
            "choose a checkpoint of one of these families or add a table under slime/weights/tables"
        )
    return builder(hf_config)
