"""Llama and models with the same architecture (SmolLM2): pre-norm, grouped-query attention, gated MLP."""

from __future__ import annotations

from slime.core.hf_config import HfConfig
from slime.models import FAMILIES
from slime.models.common.rows import attention, decoder_table, mlp, pre_norm
from slime.models.common.table import FamilyTable, Head, Spread
from slime.models.family import Family


@FAMILIES.register("llama")
class Llama(Family):
    """A plain decoder. The table covers optional biases, although this release does not train them."""

    shares_prefixes = True
    lends_kernels = True

    def weight_map(self, hf_config: HfConfig) -> FamilyTable:
        bias, mlp_bias = (bool(hf_config.get(name, False)) for name in ("attention_bias", "mlp_bias"))
        return decoder_table(
            hf_config,
            lambda s, _: pre_norm(
                s.hidden_size,
                attention(s, qkv_bias=bias, out_bias=bias),
                mlp(s.hidden_size, s.intermediate_size, bias=mlp_bias),
            ),
            spread=self.spread(hf_config),
        )

    def spread(self, hf_config: HfConfig) -> Spread:
        return Spread(stages=Head.EVERY)
