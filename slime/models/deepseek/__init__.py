"""Models with latent attention: DeepSeek-V3 (V3.1, R1), Kimi-K2 and GLM-4.7-Flash. DeepSeek-V3.2 and GLM-5 also have a
sparse-attention indexer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime.core.errors import ConfigError
from slime.core.hf_config import HfConfig
from slime.models import FAMILIES
from slime.models.common.config import sigmoid_experts
from slime.models.common.flops import AttentionCost
from slime.models.common.mtp import only_layer, trains_mtp
from slime.models.common.table import FamilyTable, Head, Spread
from slime.models.deepseek.config import deepseek_table, indexer_kinds, latent_cost
from slime.models.family import Family

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig


@FAMILIES.register("deepseek_v3", "kimi_k2", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa")
class DeepSeek(Family):
    """A model with latent attention. The first layers are dense; all others are MoE layers."""

    rope_kinds = ("default", "linear", "llama3", "yarn")
    refused_biases = ()
    # transformers 5.19 writes "indexed_attention" instead of "deepseek_sparse_attention".
    layer_kinds = ("full_attention", "deepseek_sparse_attention", "indexed_attention")
    per_layer = ("layer_types", "mlp_layer_types", "indexer_types", "index_topk_pattern")
    rotates_itself = True
    shares_prefixes = True

    def prefix_problem(self, hf_config: HfConfig) -> str | None:
        if indexer_kinds(hf_config):
            return "its indexer selects keys over whole sequences"
        return super().prefix_problem(hf_config)

    def memory_is_linear_from(self, hf_config: HfConfig) -> int:
        return int(hf_config["index_topk"]) + 1 if indexer_kinds(hf_config) else 0

    def departures(self, hf_config: HfConfig) -> dict[str, Any]:
        _refuse(hf_config)
        heads, nope, rope = (int(hf_config[n]) for n in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
        return {
            "multi_latent_attention": True,
            "q_lora_rank": hf_config.get("q_lora_rank"),
            "kv_lora_rank": int(hf_config["kv_lora_rank"]),
            "qk_head_dim": nope,
            "qk_pos_emb_head_dim": rope,
            "v_head_dim": int(hf_config["v_head_dim"]),
            "kv_channels": nope + rope,
            "num_query_groups": heads,
            "group_query_attention": False,
            "qk_layernorm": True,
            **sigmoid_experts(hf_config),
        }

    def weight_map(self, hf_config: HfConfig) -> FamilyTable:
        mtp = self.mtp_config(hf_config) if trains_mtp(hf_config) else None
        return deepseek_table(hf_config, self.spread(hf_config), mtp)

    def mtp_config(self, hf_config: HfConfig) -> HfConfig | None:
        """Returns None with sparse attention, because the MTP layer would have an indexer."""
        return None if indexer_kinds(hf_config) else only_layer(hf_config)

    def spread(self, hf_config: HfConfig) -> Spread:
        head = Head.EVERY if hf_config["model_type"] == "glm4_moe_lite" else Head.LAST
        return Spread(dp_attention=True, stages=head, whole_dense_mlp=True)

    def attention(self, config: TransformerConfig, hf_config: HfConfig, layer: int, standard: ModuleSpec) -> ModuleSpec:
        from megatron.core.transformer.spec_utils import ModuleSpec

        from slime.models.deepseek.layers import LatentAttention

        return ModuleSpec(module=LatentAttention, params={"hf_config": hf_config})

    def attention_cost(self, hf_config: HfConfig, layer: int) -> AttentionCost:
        return latent_cost(hf_config, layer)


def _refuse(hf_config: HfConfig) -> None:
    needed = (
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "moe_intermediate_size",
        "n_routed_experts",
        "num_experts_per_tok",
    )
    if missing := [name for name in needed if not hf_config.get(name)]:
        raise ConfigError(
            f"config.json lacks {', '.join(missing)}, required for latent attention and experts; add them"
        )
    if hf_config.get("attention_bias"):
        raise ConfigError("the checkpoint has attention_bias, which the engine's latent attention does not support")
    if indexer_kinds(hf_config) and (
        not hf_config.get("q_lora_rank") or hf_config.get("index_k_norm_type", "layer") != "layer"
    ):
        raise ConfigError(
            "the checkpoint has a sparse-attention indexer without q_lora_rank, or with a key norm that is not a layer "
            "norm; slime supports neither"
        )
    if always := [name for name in ("index_init_tokens", "index_local_tokens") if hf_config.get(name)]:
        raise ConfigError(
            f"the sparse-attention indexer has {', '.join(always)}: the engine always selects these keys, but the "
            "trainer does not, so this release cannot train the checkpoint"
        )
