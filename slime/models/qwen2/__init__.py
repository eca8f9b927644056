"""Qwen2 and Qwen2.5: a plain decoder with biases on q, k and v."""

from __future__ import annotations

from typing import Any

from slime.core.hf_config import HfConfig
from slime.models import FAMILIES
from slime.models.common.rows import attention, decoder_table, mlp, pre_norm
from slime.models.common.table import FamilyTable, Head, Spread
from slime.models.family import Family


@FAMILIES.register("qwen2")
class Qwen2(Family):
    """Always has biases on q, k and v, whatever the config says."""

    refused_biases = ()
    shares_prefixes = True

    def departures(self, hf_config: HfConfig) -> dict[str, Any]:
        return {"add_qkv_bias": True}

    def weight_map(self, hf_config: HfConfig) -> FamilyTable:
        return decoder_table(
            hf_config,
            lambda s, _: pre_norm(s.hidden_size, attention(s, qkv_bias=True), mlp(s.hidden_size, s.intermediate_size)),
            spread=self.spread(hf_config),
        )

    def spread(self, hf_config: HfConfig) -> Spread:
        return Spread(stages=Head.LAST, tied_stages=True)
