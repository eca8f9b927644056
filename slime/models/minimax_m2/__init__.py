"""MiniMax-M2 (M2.1, M2.5): QK norms over all heads, rotation of half of each head, and MoE in every layer, with a
sigmoid router and a correction bias."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from slime.core.errors import ConfigError
from slime.core.hf_config import HfConfig
from slime.models import FAMILIES
from slime.models.common.config import sigmoid_experts
from slime.models.common.rows import Rows, attention, column, decoder_table, experts, pre_norm
from slime.models.common.table import FamilyTable, Head, ModelSizes, Row, Spread, Unit
from slime.models.family import Family

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

_ENGINE_READS = {"use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True, "scoring_func": "sigmoid"}
"""Values of the released configs, which SGLang reads and transformers hardcodes."""
_FILE_NAMES = {"mlp.gate.": "block_sparse_moe.gate.", "mlp.experts.": "block_sparse_moe.experts."}
_PROJECTIONS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@FAMILIES.register("minimax_m2")
class MiniMaxM2(Family):
    """Has no dense layers and no shared experts. `intermediate_size` is the expert size."""

    shares_prefixes = True

    def departures(self, hf_config: HfConfig) -> dict[str, Any]:
        """Also rejects configs that the engine would interpret differently."""
        for name, wanted in _ENGINE_READS.items():
            if hf_config.get(name) != wanted:
                raise ConfigError(
                    f"this minimax_m2 has {name} {hf_config.get(name)}, so SGLang would serve a different model from "
                    f"the trained one; set {name} to {wanted} in config.json, as in released checkpoints"
                )
        if hf_config.get("tie_word_embeddings") or hf_config.get("shared_intermediate_size"):
            raise ConfigError(
                "this minimax_m2 has tie_word_embeddings or shared_intermediate_size, which the engine does not support"
            )
        return {
            "qk_layernorm": True,
            "rotary_percent": _rotary_percent(hf_config),
            **sigmoid_experts(_of_experts(hf_config)),
            "moe_layer_freq": 1,
        }

    def weight_map(self, hf_config: HfConfig) -> FamilyTable:
        """MTP modules, stored after the last layer, are `FamilyTable.carried`."""
        first, count = int(hf_config["num_hidden_layers"]), int(hf_config.get("num_mtp_modules") or 0)
        carried = tuple(rf"model\.layers\.{first + i}\." for i in range(count))
        return decoder_table(_of_experts(hf_config), _layer, carried=carried, spread=self.spread(hf_config))

    def spread(self, hf_config: HfConfig) -> Spread:
        """With DP attention, the output layer is still split over all ranks."""
        return Spread(dp_attention=True, dp_lm_head=False, stages=Head.LAST, every_embedding=True)

    def attention(self, config: TransformerConfig, hf_config: HfConfig, layer: int, standard: ModuleSpec) -> ModuleSpec:
        from slime.models.common.packed_attention import packed_attention
        from slime.models.minimax_m2.layers import WholeNormedAttention

        return packed_attention(config, standard, WholeNormedAttention)

    def mlp(self, config: TransformerConfig, hf_config: HfConfig, layer: int, standard: Any) -> Any:
        from slime.models.common.mlp import WideRoutedExperts

        return WideRoutedExperts


def _of_experts(hf_config: HfConfig) -> HfConfig:
    """Returns the config with the standard keys for experts."""
    names = {"moe_intermediate_size": "intermediate_size", "n_routed_experts": "num_local_experts"}
    return {**hf_config, **{ours: hf_config[theirs] for ours, theirs in names.items()}, "topk_method": "noaux_tc"}


def _rotary_percent(hf_config: HfConfig) -> float:
    """Returns the fraction of each head that is rotated. Raises `ConfigError` if SGLang and transformers disagree."""
    head_dim = int(hf_config.get("head_dim") or int(hf_config["hidden_size"]) // int(hf_config["num_attention_heads"]))
    percent = int(hf_config.get("rotary_dim") or head_dim) / head_dim
    parameters: HfConfig = hf_config.get("rope_parameters") or {}
    factor = parameters.get("partial_rotary_factor", hf_config.get("partial_rotary_factor"))
    if factor is not None and float(factor) != percent:
        raise ConfigError(
            f"this minimax_m2 has partial_rotary_factor {factor} and rotary_dim {hf_config.get('rotary_dim')} in "
            f"heads of {head_dim}: transformers reads the first, SGLang the second; make them agree in config.json"
        )
    return percent


def _layer(s: ModelSizes, _: int) -> Rows:
    d = s.head_dim
    norms = (
        column("self_attention.q_norm.weight", "self_attn.q_norm.weight", [(s.num_heads * d,)], Unit.HEADS),
        column("self_attention.k_norm.weight", "self_attn.k_norm.weight", [(s.num_kv_heads * d,)], Unit.KV_HEADS),
    )
    routed = experts(s, bias="block_sparse_moe.e_score_correction_bias")
    return pre_norm(s.hidden_size, (*attention(s), *norms), tuple(map(_as_filed, routed)))


def _as_filed(row: Row) -> Row:
    """Gives the row the names of released checkpoints. The router's row is float32."""

    def filed(name: str) -> str:
        for ours, theirs in (*_FILE_NAMES.items(), *_PROJECTIONS.items()):
            name = name.replace(ours, theirs)
        return name

    wide = row.wide or row.megatron == "mlp.router.weight"
    return dataclasses.replace(row, hf=tuple(map(filed, row.hf)), engine=filed(row.engine), wide=wide)
