"""How many floating-point operations a forward pass over one sequence takes, from the HF config alone.

For balancing ranks and for the `perf/*_tflops` metrics. Matrix products only, two operations per multiply-add; norms,
softmax, rotary embedding and the embedding look-up are left out, as is usual for model FLOPs (Kaplan et al. 2020,
"Scaling laws for neural language models", section 2.1; Narayanan et al. 2021, arXiv 2104.04473, appendix).

Invariants
1. Attention counts the pairs that a causal mask lets through, n (n + 1) / 2, or those of a sliding window. Sparse
   attention sees as many keys as a window of `index_topk`; its indexer scores all pairs.
2. A mixture of experts counts the experts that a token visits, the shared experts and the router.
3. Sequences of a packed row do not see each other, so the cost of a row is the sum over its sequences.
4. Recomputed activations are not counted: the figure says how fast the model trains, not how busy the device is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.core.errors import ConfigError
from slime.settings.model_shape import is_sparse, num_experts_of
from slime.settings.shapes.deepseek import indexer_kinds
from slime.settings.shapes.qwen_next import is_linear

TRAIN_FORWARDS = 3
"""A training pass costs three forward passes: one forward, and two in the backward (inputs and weights)."""

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FlopsModel:
    """Cost of one architecture; all layers together."""

    per_token: float
    """FLOPs per token of all matrix products with weights, LM head apart."""
    per_logit: float
    """FLOPs of the LM head per position whose logits are computed."""
    per_pair: tuple[tuple[int | None, float], ...]
    """(window in tokens or None, FLOPs per pair of query and key summed over the layers with that window)."""

    @classmethod
    def from_hf(cls, config: Config) -> FlopsModel:
        """From the dict of a config.json, flat or with the language model under `text_config`.

        Knows decoders with gated three-matrix MLPs: dense, grouped-query, multi-head latent attention (DeepSeek-AI
        2024, arXiv 2405.04434), sparse attention, gated delta nets and mixtures of experts. Raises `ConfigError` for a
        missing key and for attention of another kind.
        """
        config = config.get("text_config") or config
        try:
            num_layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
            projections, pair = _attention(config, hidden)
            indexer, score = _indexer(config, hidden)
            full = [layer for layer in range(num_layers) if not is_linear(config, layer)]
            num_linear = num_layers - len(full)
            linear = num_linear * _delta_net(config, hidden) if num_linear else 0
            mlps = sum(_mlp(config, hidden, layer) for layer in range(num_layers))
            indexers = indexer_kinds(config).count("full")
            per_logit = 2.0 * hidden * int(config["vocab_size"])
        except KeyError as missing:
            raise ConfigError(f"got a config.json without {missing}, because of which FLOPs are unknown") from missing
        windows = Counter(_window(config, layer) for layer in full)
        per_pair = tuple((window, 2.0 * pair * count) for window, count in windows.items())
        if indexers:
            per_pair += ((None, 2.0 * score * indexers),)
        return cls(2.0 * (len(full) * projections + linear + indexers * indexer + mlps), per_logit, per_pair)

    def forward(self, num_tokens: int, *, num_logits: int | None = None, causal: bool = True) -> float:
        """FLOPs of a forward pass over one sequence.

        `num_logits`: positions that the LM head is applied to (default: all). Without `causal`, all pairs count, as
        in an implementation that computes masked pairs, too.
        """
        pairs = 0.0
        for window, flops in self.per_pair:
            width = num_tokens if window is None else min(window, num_tokens)
            seen = width * (width + 1) / 2 + (num_tokens - width) * width
            pairs += flops * (seen if causal else num_tokens**2)
        logits = num_tokens if num_logits is None else num_logits
        return self.per_token * num_tokens + self.per_logit * logits + pairs


def tflops_per_gpu(forward_flops: float, *, time_s: float, num_gpus: int, num_forwards: int = TRAIN_FORWARDS) -> float:
    """10^12 FLOPs per second and GPU: the `perf/*_tflops` metrics (`num_forwards=1` for passes without gradients).

    `forward_flops`: sum over all samples of the whole batch; `num_gpus`: all that shared the work. 0 for no time.
    """
    return num_forwards * forward_flops / (time_s * num_gpus) / 1e12 if time_s > 0 else 0.0


def _attention(config: Config, hidden: int) -> tuple[int, int]:
    """(multiply-adds of one layer's projections per token, of its attention per pair of query and key)."""
    heads = int(config["num_attention_heads"])
    if config.get("kv_lora_rank"):
        nope, rope, value = (int(config[k]) for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        kv_rank, q_rank = int(config["kv_lora_rank"]), config.get("q_lora_rank")
        query = heads * (nope + rope)
        down_up_q = hidden * query if q_rank is None else int(q_rank) * (hidden + query)
        down_up_kv = hidden * (kv_rank + rope) + kv_rank * heads * (nope + value)
        return down_up_q + down_up_kv + heads * value * hidden, heads * (nope + rope + value)
    head_dim = int(config.get("head_dim") or hidden // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    gates = heads if config.get("linear_num_key_heads") else 0  # beside linear attention, full attention is gated
    return hidden * head_dim * (2 * heads + 2 * kv_heads + gates), 2 * heads * head_dim


def _delta_net(config: Config, hidden: int) -> int:
    """Multiply-adds of one layer of linear attention per token: projections, convolution and recurrence (S k, the
    outer product and S q for each value head; in chunks it takes more, and is faster)."""
    key_heads, value_heads = int(config["linear_num_key_heads"]), int(config["linear_num_value_heads"])
    key_dim, value_dim = int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"])
    qkv = 2 * key_heads * key_dim + value_heads * value_dim
    projections = hidden * (qkv + 2 * value_heads * (value_dim + 1))
    return projections + qkv * int(config["linear_conv_kernel_dim"]) + 3 * value_heads * key_dim * value_dim


def _indexer(config: Config, hidden: int) -> tuple[int, int]:
    """(multiply-adds of one indexer's projections per token, of its scores per pair of query and key)."""
    if not indexer_kinds(config):
        return 0, 0
    heads, dim = int(config["index_n_heads"]), int(config["index_head_dim"])
    return int(config["q_lora_rank"]) * heads * dim + hidden * (dim + heads), heads * (dim + 1)


def _window(config: Config, layer: int) -> int | None:
    """Tokens that a query of this layer sees at most; None for all before it."""
    if config.get("index_topk"):
        return int(config["index_topk"])
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    kind = kinds[layer] if kinds else "sliding_attention" if window and config.get("use_sliding_window", True) else None
    if kind not in (None, "full_attention", "sliding_attention"):
        raise ConfigError(f"got a config.json with layers of type {kind!r}, whose FLOPs are not modelled")
    return int(window) if kind == "sliding_attention" and window else None


def _mlp(config: Config, hidden: int, layer: int) -> int:
    """Multiply-adds of one layer's MLP per token."""
    num_experts = num_experts_of(config)
    if not is_sparse(config, layer):
        return 3 * hidden * int(config["intermediate_size"])
    size = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    shared = int(config.get("n_shared_experts") or 0) * size
    own = int(config.get("shared_expert_intermediate_size") or 0)  # Qwen MoE: its size, and a gate of its own
    router = hidden * (num_experts + (own > 0))
    return 3 * hidden * (int(config["num_experts_per_tok"]) * size + shared + own) + router
