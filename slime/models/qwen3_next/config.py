"""The torch-free part of Qwen3-Next, Qwen3.5 and 3.6: weight map, multiply-adds, and which layers are linear.

Released checkpoints store the projections in two orders, which map to the same Megatron parameter. Qwen3-Next orders
them by key head; Qwen3.5 has separate blocks of all queries, keys and values. Qwen3.5 and 3.6 are parts of multimodal
models. The vision tower and untrained MTP layers are `FamilyTable.carried`.
"""

from __future__ import annotations

import dataclasses

from slime.core.hf_config import HfConfig
from slime.models.common.config import is_sparse
from slime.models.common.flops import AttentionCost, grouped_query_cost, head_sizes
from slime.models.common.mtp import CARRIED_DRAFT, as_draft, head_rows, layer_rows
from slime.models.common.rows import Rows, attention, column, copy, decoder_table, experts, mlp, pre_norm, row
from slime.models.common.table import EXPERT, FamilyTable, ModelSizes, Row, Spread


def is_linear(config: HfConfig, layer: int) -> bool:
    """Returns whether a layer uses linear instead of full attention."""
    if kinds := config.get("layer_types"):
        return bool(kinds[layer] == "linear_attention")
    if not config.get("linear_num_key_heads"):
        return False
    return (layer + 1) % int(config.get("full_attention_interval") or 4) != 0


def split_problem(key_heads: int, tp_size: int, cp_size: int) -> str | None:
    """Returns an error message if the key heads of linear attention cannot be split over these ranks, else None."""
    if key_heads % (tp_size * cp_size) == 0:
        return None
    if cp_size == 1:
        return (
            f"tensor_model_parallel_size {tp_size} does not divide {key_heads} key heads of linear attention; choose a "
            "divisor"
        )
    return (
        f"the {tp_size * cp_size} ranks of tensor_model_parallel_size {tp_size} and context_parallel_size {cp_size} "
        f"cannot split {key_heads} key heads of linear attention evenly; choose sizes whose product "
        "divides the heads"
    )


CARRIED = (r"mtp\.", r"(model\.)?visual\.")
"""Patterns for the HF tensors of the MTP layer and the vision tower."""


def qwen_next_table(hf_config: HfConfig, spread: Spread, mtp: HfConfig | None) -> FamilyTable:
    """Returns the weight map. `mtp`: the config of the MTP layer if it is trained, else None."""

    def layer(s: ModelSizes, number: int) -> Rows:
        return _layer(s, hf_config, number, stacked=bool(hf_config.get("_stacked_experts")))

    prefix = "model.language_model." if hf_config.get("wrapper_type") else "model."
    carried = (*CARRIED, CARRIED_DRAFT) if mtp is None else CARRIED[1:]
    table = decoder_table(hf_config, layer, prefix=prefix, carried=carried, spread=spread)
    return dataclasses.replace(table.with_rows(_as_served), mtp=() if mtp is None else _mtp_rows(mtp))


def _layer(s: ModelSizes, config: HfConfig, number: int, *, stacked: bool) -> Rows:
    linear = is_linear(config, number)
    mixer = delta_net(config, s.hidden_size) if linear else attention(s, qk_norm=True, gated=True)
    if not is_sparse(config, number):
        return pre_norm(s.hidden_size, mixer, mlp(s.hidden_size, s.intermediate_size))
    size = int(config["shared_expert_intermediate_size"])
    rows = experts(s, shared=("mlp.shared_expert", size), shared_gate="mlp.shared_expert_gate.weight")
    return pre_norm(s.hidden_size, mixer, tuple(map(_stacked, rows)) if stacked else rows)


def _mtp_rows(config: HfConfig) -> Rows:
    """Returns the rows of the MTP layer. The draft is a one-layer model; norms and projection are outside it."""
    s = ModelSizes.from_hf(config)
    names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
    around = map(_as_served, head_rows(s.hidden_size, names))
    *before, last = as_draft(around, lambda name: name.replace("mtp.norm", "model.norm").removeprefix("mtp."))
    rows = _layer(s, config, 0, stacked=bool(config.get("_stacked_mtp_experts")))
    layer = as_draft(map(_as_served, layer_rows(rows, "mtp.layers.0.", "model.layers.0.")))
    return (*before, *layer, last)


def delta_net(hf_config: HfConfig, hidden: int) -> Rows:
    """Returns the rows of a gated delta net. See `layers.GatedDeltaNet` for the order within a key head."""
    key_heads, value_heads = int(hf_config["linear_num_key_heads"]), int(hf_config["linear_num_value_heads"])
    keys, value_dim = key_heads * int(hf_config["linear_key_head_dim"]), int(hf_config["linear_value_head_dim"])
    values, taps = value_heads * value_dim, int(hf_config["linear_conv_kernel_dim"])
    per_head = hf_config["model_type"] == "qwen3_next"
    parts = (
        {"qkvz": (2 * keys + 2 * values,), "ba": (2 * value_heads,)}
        if per_head
        else {"qkv": (keys, keys, values), "z": (values,), "b": (value_heads,), "a": (value_heads,)}
    )
    name, ours = "linear_attn", "self_attention"
    return (
        column(
            f"{ours}.in_proj.weight",
            tuple(f"{name}.in_proj_{part}.weight" for part in parts),
            [(sum(sizes), hidden) for sizes in parts.values()],
            engines=tuple(f"{name}.in_proj_{'ba' if part in ('ba', 'b', 'a') else 'qkvz'}.weight" for part in parts),
            segments=tuple(size for sizes in parts.values() for size in sizes),
            groups=key_heads,
        ),
        column(
            f"{ours}.conv1d.weight",
            f"{name}.conv1d.weight",
            [(2 * keys + values, 1, taps)],
            segments=(keys, keys, values),
            groups=key_heads,
        ),
        column(f"{ours}.dt_bias", f"{name}.dt_bias", [(value_heads,)]),
        column(f"{ours}.A_log", f"{name}.A_log", [(value_heads,)], wide=True),
        copy(f"{ours}.out_norm.weight", f"{name}.norm.weight", value_dim),
        row(f"{ours}.out_proj.weight", f"{name}.out_proj.weight", hidden, values),
    )


def _stacked(row: Row) -> Row:
    """Changes a routed expert's row for checkpoints that stack all experts in one tensor, each as [gate; up]."""
    if EXPERT not in row.megatron:
        return row
    name = "mlp.experts.gate_up_proj" if len(row.hf) == 2 else "mlp.experts.down_proj"
    out, size = row.shapes[0]
    return dataclasses.replace(row, hf=(name,), shapes=((len(row.hf) * out, size),), stacked=True)


def _as_served(row: Row) -> Row:
    """Gives the row SGLang's name, which has the language model at the top level and omits `self_attn`."""

    def resident(name: str) -> str:
        return name.replace("model.language_model.", "model.").replace(".self_attn.", ".")

    engine = resident(row.engine)
    # SGLang's zero-centred norms store weight + 1 in a second tensor.
    zero_centred = row.megatron.endswith("norm.weight") and not row.megatron.endswith("out_norm.weight")
    plus_one = f"{engine.removesuffix('weight')}gemma_weight" if zero_centred else ""
    return dataclasses.replace(row, engine=engine, engines=tuple(map(resident, row.engines)), plus_one=plus_one)


def mixer_cost(config: HfConfig, layer: int) -> AttentionCost:
    """Returns the multiply-adds of a layer's linear attention, or of full attention with a gate per head."""
    if is_linear(config, layer):
        return AttentionCost(_delta_net(config))
    plain = grouped_query_cost(config, layer)
    heads, _, head_dim = head_sizes(config)
    return dataclasses.replace(plain, per_token=plain.per_token + int(config["hidden_size"]) * head_dim * heads)


def _delta_net(config: HfConfig) -> int:
    """Returns the multiply-adds per token of projections, convolution and recurrence (S k, outer product and S q per
    value head). The chunked form needs more of them but is faster."""
    key_heads, value_heads = int(config["linear_num_key_heads"]), int(config["linear_num_value_heads"])
    key_dim, value_dim = int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"])
    qkv = 2 * key_heads * key_dim + value_heads * value_dim
    projections = int(config["hidden_size"]) * (qkv + 2 * value_heads * (value_dim + 1))
    return projections + qkv * int(config["linear_conv_kernel_dim"]) + 3 * value_heads * key_dim * value_dim
