"""Helpers that construct rows, and the rows of common decoder modules.

`at_layer` adds the layer prefix to all names. The engine name is the first HF name, unless the engine fuses tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from slime.core.hf_config import HfConfig
from slime.models.common.table import EMBEDDING, EXPERT, HEAD, PLAIN, FamilyTable, ModelSizes, Row, Spread, Unit

Rows = tuple[Row, ...]


def prefixed(rows: Iterable[Row], megatron: str, hf: str, engine: str) -> Rows:
    """Adds prefixes to the names of rows."""
    return tuple(
        dataclasses.replace(
            row,
            megatron=megatron + row.megatron,
            hf=tuple(hf + name for name in row.hf),
            engine=engine + row.engine,
            engines=tuple(engine + name for name in row.engines),
        )
        for row in rows
    )


def at_layer(rows: Iterable[Row], prefix: str = "model.") -> Rows:
    """Adds the layer prefix to the rows of a layer. `prefix` precedes `layers.` in HF and engine names."""
    hf = prefix + "layers.{layer}."
    return prefixed(rows, "decoder.layers.{layer}.", hf, hf)


def copy(megatron: str, name: str, *shape: int, engine: str | None = None, **options: Any) -> Row:
    """Returns the row of a tensor that is replicated on every rank."""
    return Row(megatron, (name,), (shape,), engine or name, **options)


def column(
    megatron: str,
    names: str | tuple[str, ...],
    shapes: Sequence[tuple[int, ...]],
    units: Unit | tuple[Unit, ...] = Unit.EVEN,
    *,
    engine: str | None = None,
    **options: Any,
) -> Row:
    """Returns the row of tensors stacked and split along output features. A single unit applies to all segments."""
    names = (names,) if isinstance(names, str) else names
    if isinstance(units, Unit):
        units = (units,) * len(options.get("segments") or shapes)
    return Row(megatron, names, tuple(shapes), engine or names[0], dim=0, units=units, **options)


def row(megatron: str, name: str, out: int, size: int, unit: Unit = Unit.EVEN, **options: Any) -> Row:
    """Returns the row of a weight [out, size] that is split along input features."""
    engine = options.pop("engine", name)
    return Row(megatron, (name,), ((out, size),), engine, dim=1, units=(unit,), **options)


def norm(megatron: str, name: str, size: int) -> Row:
    return copy(f"{megatron}.weight", f"{name}.weight", size)


def attention(
    s: ModelSizes, *, qkv_bias: bool = False, out_bias: bool = False, qk_norm: bool = False, gated: bool = False
) -> Rows:
    """Returns the rows of grouped-query attention, fused per KV head. `gated`: a gate follows each query head."""
    heads, d = (s.num_heads, s.num_kv_heads, s.num_kv_heads), s.head_dim
    sizes = tuple(n * d * (2 if gated and i == 0 else 1) for i, n in enumerate(heads))
    units = (Unit.HEADS, Unit.KV_HEADS, Unit.KV_HEADS)

    def qkv(kind: str, *more: int) -> Row:
        return column(
            f"self_attention.linear_qkv.{kind}",
            tuple(f"self_attn.{p}_proj.{kind}" for p in "qkv"),
            [(n, *more) for n in sizes],
            units,
            engine=f"self_attn.qkv_proj.{kind}",
            groups=s.num_kv_heads,
        )

    out = "self_attn.o_proj"
    rows = (
        (True, qkv("weight", s.hidden_size)),
        (qkv_bias, qkv("bias")),
        (qk_norm, norm("self_attention.q_layernorm", "self_attn.q_norm", d)),
        (qk_norm, norm("self_attention.k_layernorm", "self_attn.k_norm", d)),
        (True, row("self_attention.linear_proj.weight", f"{out}.weight", s.hidden_size, s.num_heads * d, Unit.HEADS)),
        (out_bias, copy("self_attention.linear_proj.bias", f"{out}.bias", s.hidden_size)),
    )
    return tuple(row for present, row in rows if present)


def mlp(
    hidden: int,
    size: int,
    *,
    megatron: str = "mlp",
    hf: str = "mlp",
    engines: tuple[str, str] | None = None,
    bias: bool = False,
) -> Rows:
    """Returns the rows of a gated MLP. `engines`: resident names of [gate; up] and down if experts share them."""
    gate_up, down = engines or (f"{hf}.gate_up_proj.weight", f"{hf}.down_proj.weight")

    def fc1(kind: str, *more: int) -> Row:
        names = tuple(f"{hf}.{p}_proj.{kind}" for p in ("gate", "up"))
        engine = gate_up.removesuffix("weight") + kind if not engines else gate_up
        return column(f"{megatron}.linear_fc1.{kind}", names, [(size, *more)] * 2, Unit.FEATURES, engine=engine)

    rows = (
        (True, fc1("weight", hidden)),
        (bias, fc1("bias")),
        (
            True,
            row(f"{megatron}.linear_fc2.weight", f"{hf}.down_proj.weight", hidden, size, Unit.FEATURES, engine=down),
        ),
        (bias, copy(f"{megatron}.linear_fc2.bias", f"{hf}.down_proj.bias", hidden)),
    )
    return tuple(row for present, row in rows if present)


def experts(
    s: ModelSizes,
    *,
    bias: str | None = None,
    shared: tuple[str, int] | None = None,
    shared_gate: str | None = None,
    widened_router: bool = False,
) -> Rows:
    """Returns the rows of a router and its experts. Engines stack all experts' [gate; up], and all experts' down.

    `bias`: HF name of the router's correction bias. `shared`: HF name and number of features of the shared experts.
    `shared_gate`: HF name of the shared experts' gate. `widened_router`: see `Row.widened`.
    """
    hidden = s.hidden_size
    rows: Rows = (copy("mlp.router.weight", "mlp.gate.weight", s.num_experts, hidden, widened=widened_router),)
    if bias:
        rows += (copy("mlp.router.expert_bias", bias, s.num_experts, wide=True, trained=False),)
    rows += mlp(
        hidden,
        s.moe_intermediate_size,
        megatron=f"mlp.experts.local_experts.{EXPERT}",
        hf=f"mlp.experts.{EXPERT}",
        engines=("mlp.experts.w13_weight", "mlp.experts.w2_weight"),
    )
    if shared:
        rows += mlp(hidden, shared[1], megatron="mlp.shared_experts", hf=shared[0])
    if shared_gate:
        rows += (copy("mlp.shared_experts.gate_weight", shared_gate, 1, hidden),)
    return rows


def decoder_table(
    hf_config: HfConfig,
    layer: Callable[[ModelSizes, int], Rows],
    *,
    prefix: str = "model.",
    carried: tuple[str, ...] = (),
    spread: Spread = PLAIN,
    mtp: Rows = (),
    duplicates: Mapping[str, str] = MappingProxyType({}),
) -> FamilyTable:
    """Returns a decoder's table with embedding and output layer. `layer(sizes, number)` returns the rows of a layer."""
    sizes = ModelSizes.from_hf(hf_config)
    hidden, vocab = sizes.hidden_size, [(sizes.vocab_size, sizes.hidden_size)]
    tied = bool(hf_config.get("tie_word_embeddings", False))
    output = column(HEAD, "lm_head.weight", vocab, Unit.VOCAB)
    return FamilyTable(
        family=str(hf_config["model_type"]),
        sizes=sizes,
        before=(column(EMBEDDING, f"{prefix}embed_tokens.weight", vocab, Unit.VOCAB),),
        layers=tuple(at_layer(layer(sizes, number), prefix) for number in range(sizes.num_layers)),
        after=(norm("decoder.final_layernorm", f"{prefix}norm", hidden), *(() if tied else (output,))),
        tied=tied,
        mtp=mtp,
        duplicates=duplicates,
        carried=carried,
        spread=spread,
    )


def pre_norm(hidden: int, attention_rows: Rows, mlp_rows: Rows) -> Rows:
    """Returns the rows of a layer with norms before attention and before the MLP."""
    return (
        norm("input_layernorm", "input_layernorm", hidden),
        *attention_rows,
        norm("pre_mlp_layernorm", "post_attention_layernorm", hidden),
        *mlp_rows,
    )
