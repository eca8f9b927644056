"""Llama, and what has its layout (Mistral): pre-norm, grouped-query attention, gated MLP, optional biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.weights.tables.table import FamilyTable, Kind, ModelShape, Row

MEGATRON_LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."


def layer_row(megatron: str, engine: str, kind: Kind, *hf: str) -> Row:
    """A row of a layer; names without the layer prefix. Engine names equal HF names unless fused."""
    return Row(MEGATRON_LAYER + megatron, tuple(HF_LAYER + name for name in hf or (engine,)), HF_LAYER + engine, kind)


def qkv_row(suffix: str) -> Row:
    """q, k and v as one fused tensor; `suffix` is weight or bias."""
    parts = (f"self_attn.{p}_proj.{suffix}" for p in "qkv")
    return layer_row(f"self_attention.linear_qkv.{suffix}", f"self_attn.qkv_proj.{suffix}", Kind.QKV, *parts)


def gate_up_row(suffix: str) -> Row:
    """gate and up as one fused tensor; `suffix` is weight or bias."""
    parts = (f"mlp.{p}_proj.{suffix}" for p in ("gate", "up"))
    return layer_row(f"mlp.linear_fc1.{suffix}", f"mlp.gate_up_proj.{suffix}", Kind.GATE_UP, *parts)


def mlp_rows(bias: bool) -> tuple[Row, ...]:
    """A dense gated MLP."""
    rows = (
        (True, gate_up_row("weight")),
        (bias, gate_up_row("bias")),
        (True, layer_row("mlp.linear_fc2.weight", "mlp.down_proj.weight", Kind.ROW)),
        (bias, layer_row("mlp.linear_fc2.bias", "mlp.down_proj.bias", Kind.COPY)),
    )
    return tuple(row for present, row in rows if present)


def expert_rows() -> tuple[Row, ...]:
    """A router and its gated experts. The engine stacks [gate; up] of all experts, and down of all experts."""
    megatron, hf = "mlp.experts.local_experts.{expert}.", "mlp.experts.{expert}."
    return (
        layer_row("mlp.router.weight", "mlp.gate.weight", Kind.COPY),
        layer_row(
            megatron + "linear_fc1.weight",
            "mlp.experts.w13_weight",
            Kind.GATE_UP,
            hf + "gate_proj.weight",
            hf + "up_proj.weight",
        ),
        layer_row(megatron + "linear_fc2.weight", "mlp.experts.w2_weight", Kind.ROW, hf + "down_proj.weight"),
    )


EMBEDDING = Row(
    "embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "model.embed_tokens.weight", Kind.VOCAB
)
FINAL_NORM = Row("decoder.final_layernorm.weight", ("model.norm.weight",), "model.norm.weight", Kind.COPY)
OUTPUT = Row("output_layer.weight", ("lm_head.weight",), "lm_head.weight", Kind.VOCAB)


def decoder_table(
    family: str,
    hf_config: Mapping[str, Any],
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool = False,
    mlp: tuple[Row, ...] | None = None,
    tied_default: bool = False,
) -> FamilyTable:
    """The rows of a pre-norm decoder with the given options; `mlp` is dense without biases unless given."""
    tied = bool(hf_config.get("tie_word_embeddings", tied_default))
    options = (
        (True, layer_row("input_layernorm.weight", "input_layernorm.weight", Kind.COPY)),
        (True, qkv_row("weight")),
        (qkv_bias, qkv_row("bias")),
        (qk_norm, layer_row("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", Kind.COPY)),
        (qk_norm, layer_row("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", Kind.COPY)),
        (True, layer_row("self_attention.linear_proj.weight", "self_attn.o_proj.weight", Kind.ROW)),
        (out_bias, layer_row("self_attention.linear_proj.bias", "self_attn.o_proj.bias", Kind.COPY)),
        (True, layer_row("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", Kind.COPY)),
    )
    layer = (*(row for present, row in options if present), *(mlp_rows(bias=False) if mlp is None else mlp))
    rows = (EMBEDDING, *layer, FINAL_NORM, *(() if tied else (OUTPUT,)))
    return FamilyTable(family=family, shape=ModelShape.from_hf(hf_config), rows=rows, tied=tied)


def llama_table(hf_config: Mapping[str, Any]) -> FamilyTable:
    """Rows of a Llama-like model; `attention_bias` and `mlp_bias` as in its config."""
    bias = bool(hf_config.get("attention_bias", False))
    return decoder_table(
        str(hf_config["model_type"]),
        hf_config,
        qkv_bias=bias,
        out_bias=bias,
        mlp=mlp_rows(bias=bool(hf_config.get("mlp_bias", False))),
    )
