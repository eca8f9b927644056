"""A toy family: the layout of Qwen3 under a `model_type` of its own."""

from __future__ import annotations

from typing import Any

from slime.core.hf_config import HfConfig
from slime.models import FAMILIES
from slime.models.common.rows import attention, decoder_table, mlp, pre_norm
from slime.models.common.table import FamilyTable
from slime.models.family import Family


@FAMILIES.register("toy")
class Toy(Family):
    """A decoder with norms of q and k."""

    def departures(self, hf_config: HfConfig) -> dict[str, Any]:
        """Norms of q and k per head."""
        return {"qk_layernorm": True}

    def weight_map(self, hf_config: HfConfig) -> FamilyTable:
        """Rows of a pre-norm decoder."""
        return decoder_table(
            hf_config,
            lambda s, _: pre_norm(s.hidden_size, attention(s, qk_norm=True), mlp(s.hidden_size, s.intermediate_size)),
        )
