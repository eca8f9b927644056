"""MiniMax-M2 (M2.1, M2.5): queries and keys are normed over all heads together, half of each head is rotated, and every
layer has experts behind a sigmoid router with a correction bias.
"""

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
"""Config keys that SGLang reads, with the released models' values; transformers hard-codes them."""
_FILE_NAMES = {"mlp.gate.": "block_sparse_moe.gate.", "mlp.experts.": "block_sparse_moe.experts."}
_PROJECTIONS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@FAMILIES.register("minimax_m2")
class MiniMaxM2(Family):
    """No dense layers and no shared experts; `intermediate_size` is the size of one expert."""

    shares_prefixes = True

    def departures(self, hf_config: HfConfig) -> dict[str, Any]:
        """Norms of q and k, partial rotation, experts. Raises `ConfigError` for settings that the engine serves
        differently.
        """
        for name, wanted in _ENGINE_READS.items():
            if hf_config.get(name) != wanted:
                raise ConfigError(
                    f"got a minimax_m2 with {name} {hf_config.get(name)}, by which SGLang would serve another model "
                    f"than the one that is trained; write {name} {wanted} into config.json, as released files have it"
                )
        if hf_config.get("tie_word_embeddings") or hf_config.get("shared_intermediate_size"):
            raise ConfigError(
                "got a minimax_m2 with tie_word_embeddings or shared_intermediate_size, which the engine does not know"
            )
        return {
            "qk_layernorm": True,
            "rotary_percent": _rotary_percent(hf_config),
            **sigmoid_experts(_of_experts(hf_config)),
            "moe_layer_freq": 1,
        }

    def weight_map(self, hf_config: HfConfig) -> FamilyTable:
        """Rows of the model; multi-token prediction modules, if files have any, are carried along."""
        first, count = int(hf_config["num_hidden_layers"]), int(hf_config.get("num_mtp_modules") or 0)
        carried = tuple(rf"model\.layers\.{first + i}\." for i in range(count))
        return decoder_table(_of_experts(hf_config), _layer, carried=carried, spread=self.spread(hf_config))

    def spread(self, hf_config: HfConfig) -> Spread:
        """In pipeline stages, each one has the embedding and the last one the output layer, which all ranks share under
        DP attention.
        """
        return Spread(dp_attention=True, dp_lm_head=False, stages=Head.LAST, every_embedding=True)

    def attention(self, config: TransformerConfig, hf_config: HfConfig, layer: int, standard: ModuleSpec) -> ModuleSpec:
        """Attention with norms over all heads together."""
        from slime.models.common.packed_attention import packed_attention
        from slime.models.minimax_m2.layers import WholeNormedAttention

        return packed_attention(config, standard, WholeNormedAttention)

    def mlp(self, config: TransformerConfig, hf_config: HfConfig, layer: int, standard: Any) -> Any:
        """Experts behind a float32 router."""
        from slime.models.common.mlp import WideRoutedExperts

        return WideRoutedExperts


def _of_experts(hf_config: HfConfig) -> HfConfig:
    """The config with the keys of families that also have dense layers."""
    names = {"moe_intermediate_size": "intermediate_size", "n_routed_experts": "num_local_experts"}
    return {**hf_config, **{ours: hf_config[theirs] for ours, theirs in names.items()}, "topk_method": "noaux_tc"}


def _rotary_percent(hf_config: HfConfig) -> float:
    """The rotated fraction of a head: `rotary_dim` for SGLang, a factor for transformers. Raises `ConfigError` if they
    differ.
    """
    head_dim = int(hf_config.get("head_dim") or int(hf_config["hidden_size"]) // int(hf_config["num_attention_heads"]))
    percent = int(hf_config.get("rotary_dim") or head_dim) / head_dim
    parameters: HfConfig = hf_config.get("rope_parameters") or {}
    factor = parameters.get("partial_rotary_factor", hf_config.get("partial_rotary_factor"))
    if factor is not None and float(factor) != percent:
        raise ConfigError(
            f"got a minimax_m2 with partial_rotary_factor {factor} and rotary_dim {hf_config.get('rotary_dim')} in "
            f"heads of {head_dim}: transformers reads the one, SGLang the other; make them agree in config.json"
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
    """The row with the names in its files, and a float32 router."""

    def filed(name: str) -> str:
        for ours, theirs in (*_FILE_NAMES.items(), *_PROJECTIONS.items()):
            name = name.replace(ours, theirs)
        return name

    wide = row.wide or row.megatron == "mlp.router.weight"
    return dataclasses.replace(row, hf=tuple(map(filed, row.hf)), engine=filed(row.engine), wide=wide)
