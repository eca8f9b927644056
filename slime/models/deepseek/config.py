"""The torch-free part of DeepSeek-V3 (V3.1, R1), GLM-4.7-Flash and GLM-5: weight map, multiply-adds, and which layers
have an indexer.

Engine names follow SGLang 0.5.16. It stacks both down projections in `fused_qkv_a_proj_with_mqa`. Both must be in one
bucket, because the loader does not keep an incomplete stack between calls. `w_kc` and `w_vc` are not parameters; the
engine computes them from `kv_b_proj` after each update. Shared experts have their own parameters only with
`--disable-shared-experts-fusion`.
"""

from __future__ import annotations

import dataclasses
import functools

from slime.core.hf_config import HfConfig
from slime.models.common.config import is_sparse
from slime.models.common.flops import AttentionCost
from slime.models.common.mtp import table_with_mtp
from slime.models.common.rows import Rows, column, copy, experts, mlp, norm, pre_norm, row
from slime.models.common.table import FamilyTable, ModelSizes, Spread, Unit


def indexer_kinds(config: HfConfig) -> list[str]:
    """Returns "full" (selects keys) or "shared" (reuses an earlier selection) per layer. Empty without indexers."""
    if not config.get("index_topk"):
        return []
    num_layers = int(config["num_hidden_layers"])
    if kinds := config.get("indexer_types"):
        return list(kinds)
    if pattern := config.get("index_topk_pattern"):
        names = {"F": "full", "S": "shared"}
        return [names.get(kind, kind) for kind in pattern]
    every, offset = max(int(config.get("index_topk_freq") or 1), 1), int(config.get("index_skip_topk_offset") or 2)
    return ["shared" if max(layer - offset + 1, 0) % every else "full" for layer in range(num_layers)]


def latent_attention(s: ModelSizes, config: HfConfig, *, indexer: bool = False) -> Rows:
    """Returns the rows of the replicated down projections (to latents) and the split up projections (to heads)."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    kv_rank, nope, rope, value = (int(config[name]) for name in names)
    hidden, heads, q_rank = s.hidden_size, s.num_heads, int(config.get("q_lora_rank") or 0)
    ours, hf = "self_attention", "self_attn"
    down = (kv_rank + rope, hidden)

    def up(megatron: str, name: str, out: int, size: int) -> Rows:
        return (column(f"{ours}.{megatron}.weight", f"{hf}.{name}.weight", [(heads * out, size)], Unit.HEADS),)

    if q_rank:
        fused = f"{hf}.fused_qkv_a_proj_with_mqa.weight"
        rows: Rows = (
            copy(f"{ours}.linear_q_down_proj.weight", f"{hf}.q_a_proj.weight", q_rank, hidden, engine=fused),
            copy(f"{ours}.linear_kv_down_proj.weight", f"{hf}.kv_a_proj_with_mqa.weight", *down, engine=fused),
            norm(f"{ours}.q_layernorm", f"{hf}.q_a_layernorm", q_rank),
            *up("linear_q_up_proj", "q_b_proj", nope + rope, q_rank),
        )
    else:
        rows = (
            *up("linear_q_proj", "q_proj", nope + rope, hidden),
            copy(f"{ours}.linear_kv_down_proj.weight", f"{hf}.kv_a_proj_with_mqa.weight", *down),
        )
    return (
        *rows,
        norm(f"{ours}.kv_layernorm", f"{hf}.kv_a_layernorm", kv_rank),
        *up("linear_kv_up_proj", "kv_b_proj", nope + value, kv_rank),
        row(f"{ours}.linear_proj.weight", f"{hf}.o_proj.weight", hidden, heads * value, Unit.HEADS),
        *(_indexer(hidden, q_rank, config) if indexer else ()),
    )


def _indexer(hidden: int, q_rank: int, config: HfConfig) -> Rows:
    """Returns the rows of an indexer. If it is interleaved, GPU engines stack the key and weight projections."""
    heads, dim = int(config["index_n_heads"]), int(config["index_head_dim"])
    ours, hf = "self_attention.indexer", "self_attn.indexer"
    engine = f"{hf}.wk_weights_proj.weight" if config.get("indexer_rope_interleave") else None
    rows = (
        copy(f"{ours}.linear_wq_b.weight", f"{hf}.wq_b.weight", heads * dim, q_rank),
        copy(f"{ours}.linear_wk.weight", f"{hf}.wk.weight", dim, hidden, engine=engine),
        copy(f"{ours}.linear_weights_proj.weight", f"{hf}.weights_proj.weight", heads, hidden, engine=engine),
        copy(f"{ours}.k_norm.weight", f"{hf}.k_norm.weight", dim, wide=True),
        copy(f"{ours}.k_norm.bias", f"{hf}.k_norm.bias", dim, wide=True),
    )
    return tuple(dataclasses.replace(row, trained=False) for row in rows)


def deepseek_table(hf_config: HfConfig, spread: Spread, mtp: HfConfig | None) -> FamilyTable:
    """Returns the weight map. `mtp`: the config of the MTP layer if it is trained, else None."""
    kinds = indexer_kinds(hf_config)

    def layer(s: ModelSizes, number: int) -> Rows:
        return _layer(s, hf_config, number, indexer=bool(kinds) and kinds[number] == "full")

    without = [number for number, kind in enumerate(kinds) if kind == "shared"]
    # Engines create an indexer for these layers as well, but never use it.
    carried = tuple(rf"model\.layers\.{number}\.self_attn\.indexer\." for number in without)
    mtp_rows = None if mtp is None else functools.partial(_layer, config=mtp, number=0)
    return table_with_mtp(hf_config, layer, mtp_rows, carried=carried, spread=spread)


def _layer(s: ModelSizes, config: HfConfig, number: int, *, indexer: bool = False) -> Rows:
    if is_sparse(config, number):
        size = int(config.get("n_shared_experts") or 0) * s.moe_intermediate_size
        shared = ("mlp.shared_experts", size) if size else None
        widened = config["model_type"] == "glm4_moe_lite"
        mlp_rows = experts(s, bias="mlp.gate.e_score_correction_bias", shared=shared, widened_router=widened)
    else:
        mlp_rows = mlp(s.hidden_size, s.intermediate_size)
    return pre_norm(s.hidden_size, latent_attention(s, config, indexer=indexer), mlp_rows)


def latent_cost(config: HfConfig, layer: int) -> AttentionCost:
    """Returns the multiply-adds of latent attention (arXiv 2405.04434), with expanded keys and values. With an indexer,
    queries attend to `index_topk` keys, but the indexer itself scores all pairs."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    nope, rope, value = (int(config[k]) for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    kv_rank, q_rank = int(config["kv_lora_rank"]), config.get("q_lora_rank")
    query = heads * (nope + rope)
    down_up_q = hidden * query if q_rank is None else int(q_rank) * (hidden + query)
    down_up_kv = hidden * (kv_rank + rope) + kv_rank * heads * (nope + value)
    per_token = down_up_q + down_up_kv + heads * value * hidden
    window = int(config["index_topk"]) if config.get("index_topk") else None
    pairs: tuple[tuple[int | None, int], ...] = ((window, heads * (nope + rope + value)),)
    if (indexer_kinds(config) or ["none"] * (layer + 1))[layer] == "full":
        index_heads, dim = int(config["index_n_heads"]), int(config["index_head_dim"])
        per_token += int(config["q_lora_rank"]) * index_heads * dim + hidden * (dim + index_heads)
        pairs += ((None, index_heads * (dim + 1)),)
    return AttentionCost(per_token, pairs)
