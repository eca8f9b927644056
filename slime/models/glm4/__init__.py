"""GLM-4 (dense): norms before and after attention and MLP. Half of each head is rotated, in interleaved pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime.core.hf_config import HfConfig
from slime.models import FAMILIES
from slime.models.common.config import rotary_percent
from slime.models.common.rows import Rows, attention, column, decoder_table, norm, row
from slime.models.common.table import FamilyTable, Head, ModelSizes, Spread, Unit
from slime.models.family import Family

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig


@FAMILIES.register("glm4")
class Glm4(Family):
    """Has biases on q, k and v. Gate and up are a single HF tensor."""

    refused_biases = ()
    output_norms = True
    shares_prefixes = True

    def departures(self, hf_config: HfConfig) -> dict[str, Any]:
        return {
            "add_qkv_bias": bool(hf_config.get("attention_bias", True)),
            "rotary_percent": rotary_percent(hf_config, 0.5),
            "rotary_interleaved": True,
        }

    def weight_map(self, hf_config: HfConfig) -> FamilyTable:
        bias = bool(hf_config.get("attention_bias", True))

        def layer(s: ModelSizes, _: int) -> Rows:
            hidden, size = s.hidden_size, s.intermediate_size
            fused = ("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", [(2 * size, hidden)], Unit.FEATURES)
            return (
                norm("input_layernorm", "input_layernorm", hidden),
                *attention(s, qkv_bias=bias),
                norm("self_attention.output_norm", "post_self_attn_layernorm", hidden),
                norm("pre_mlp_layernorm", "post_attention_layernorm", hidden),
                column(*fused, segments=(size, size)),
                row("mlp.linear_fc2.weight", "mlp.down_proj.weight", hidden, size, Unit.FEATURES),
                norm("mlp.output_norm", "post_mlp_layernorm", hidden),
            )

        return decoder_table(hf_config, layer, spread=self.spread(hf_config))

    def spread(self, hf_config: HfConfig) -> Spread:
        return Spread(stages=Head.LAST)

    def attention(self, config: TransformerConfig, hf_config: HfConfig, layer: int, standard: ModuleSpec) -> ModuleSpec:
        from slime.models.common.packed_attention import packed_attention
        from slime.models.glm4.layers import NormedAttention

        return packed_attention(config, standard, NormedAttention)

    def mlp(self, config: TransformerConfig, hf_config: HfConfig, layer: int, standard: Any) -> Any:
        from slime.models.glm4.layers import NormedMLP

        return NormedMLP
