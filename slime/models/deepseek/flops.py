"""Multiply-adds of latent attention (DeepSeek-AI 2024, arXiv 2405.04434) and of its sparse indexer."""

from __future__ import annotations

from slime.core.hf_config import HfConfig
from slime.models.common.flops import AttentionCost
from slime.models.deepseek.indexer import indexer_kinds


def latent_cost(config: HfConfig, layer: int) -> AttentionCost:
    """Of one layer. Its queries see `index_topk` keys where there is an indexer, which scores all pairs."""
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
