"""GLM-4 (dense, norms on both sides of attention and MLP) and GLM-4.5 to 4.7 (experts, with a dense first part)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.settings.model_shape import is_sparse
from slime.weights.tables.decoder import Rows, attention, column, decoder_table, experts, mlp, norm, pre_norm, row
from slime.weights.tables.table import FamilyTable, ModelShape, Unit


def glm4_table(hf_config: Mapping[str, Any]) -> FamilyTable:
    """Rows of a dense GLM-4, whose gate and up are one HF tensor."""
    bias = bool(hf_config.get("attention_bias", True))

    def layer(s: ModelShape, _: int) -> Rows:
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

    return decoder_table("glm4", hf_config, layer)


def glm4_moe_table(hf_config: Mapping[str, Any]) -> FamilyTable:
    """Rows of a GLM-4.5, 4.6 or 4.7. The layers of multi-token prediction, after the last, are carried along."""
    bias, qk_norm = bool(hf_config.get("attention_bias", False)), bool(hf_config.get("use_qk_norm", False))
    shared = int(hf_config.get("n_shared_experts") or 0)

    def layer(s: ModelShape, number: int) -> Rows:
        features = ("mlp.shared_experts", shared * s.moe_intermediate_size) if shared else None
        sparse = is_sparse(hf_config, number)
        return pre_norm(
            s.hidden_size,
            attention(s, qkv_bias=bias, qk_norm=qk_norm),
            experts(s, bias="mlp.gate.e_score_correction_bias", shared=features)
            if sparse
            else mlp(s.hidden_size, s.intermediate_size),
        )

    num_layers, predicted = int(hf_config["num_hidden_layers"]), int(hf_config.get("num_nextn_predict_layers") or 0)
    carried = tuple(rf"model\.layers\.{num_layers + i}\." for i in range(predicted))
    return decoder_table("glm4_moe", hf_config, layer, carried=carried)
