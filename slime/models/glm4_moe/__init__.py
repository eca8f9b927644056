"""GLM-4.5 to 4.7: dense first layers, then MoE layers as in DeepSeek-V3. Half of each head is rotated."""

from __future__ import annotations

import functools
from typing import Any

from slime.core.errors import ConfigError
from slime.core.hf_config import HfConfig
from slime.models import FAMILIES
from slime.models.common.config import is_sparse, rotary_percent, sigmoid_experts
from slime.models.common.mtp import only_layer, table_with_mtp, trains_mtp
from slime.models.common.rows import Rows, attention, experts, mlp, pre_norm
from slime.models.common.table import FamilyTable, Head, ModelSizes, Spread
from slime.models.family import Family


@FAMILIES.register("glm4_moe")
class Glm4Moe(Family):
    """QK norms and biases are optional in the config."""

    refused_biases = ()
    shares_prefixes = True

    def departures(self, hf_config: HfConfig) -> dict[str, Any]:
        if hf_config.get("tie_word_embeddings"):
            raise ConfigError("this glm4_moe has tie_word_embeddings, which the engine ignores; untie the embeddings")
        return {
            "add_qkv_bias": bool(hf_config.get("attention_bias", False)),
            "qk_layernorm": bool(hf_config.get("use_qk_norm", False)),
            "rotary_percent": rotary_percent(hf_config, 0.5),
            **sigmoid_experts(hf_config),
        }

    def weight_map(self, hf_config: HfConfig) -> FamilyTable:
        mtp = self.mtp_config(hf_config) if trains_mtp(hf_config) else None

        def layer(s: ModelSizes, number: int) -> Rows:
            return _layer(s, hf_config, number)

        mtp_rows = None if mtp is None else functools.partial(_layer, config=mtp, number=0)
        return table_with_mtp(hf_config, layer, mtp_rows, spread=self.spread(hf_config))

    def mtp_config(self, hf_config: HfConfig) -> HfConfig | None:
        return only_layer(hf_config)

    def spread(self, hf_config: HfConfig) -> Spread:
        return Spread(dp_attention=True, stages=Head.EVERY, whole_dense_mlp=True)


def _layer(s: ModelSizes, config: HfConfig, number: int) -> Rows:
    bias, qk_norm = bool(config.get("attention_bias", False)), bool(config.get("use_qk_norm", False))
    shared = int(config.get("n_shared_experts") or 0)
    features = ("mlp.shared_experts", shared * s.moe_intermediate_size) if shared else None
    return pre_norm(
        s.hidden_size,
        attention(s, qkv_bias=bias, qk_norm=qk_norm),
        experts(s, bias="mlp.gate.e_score_correction_bias", shared=features, widened_router=True)
        if is_sparse(config, number)
        else mlp(s.hidden_size, s.intermediate_size),
    )
