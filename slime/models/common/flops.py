"""Computes the FLOPs of a forward pass over one sequence from the HF config.

FLOPs are used to balance ranks and for the `perf/*_tflops` metrics. As usual for model FLOPs, only matrix products
count, with two operations per multiply-add. Norms, softmax, rotary embedding and embedding look-up are excluded (Kaplan
et al. 2020, "Scaling laws for neural language models", section 2.1; Narayanan et al. 2021, arXiv 2104.04473, appendix).

Invariants
1. Attention counts the query-key pairs of a causal mask, n (n + 1) / 2, or of a sliding window. Sparse attention counts
   as a window of `index_topk` tokens with the keys and values of heads, and its indexer counts all pairs. The trainer's
   extra products per pair, which save memory traffic, do not count (`slime.ops.attention.to_selected`).
2. An MoE layer counts each token's routed experts, the shared experts and the router.
3. Sequences in a packed row do not attend to each other, so the cost of a row is the sum over its sequences.
4. Recomputed activations do not count, because model FLOPs measure training speed, not device utilisation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slime.core.errors import ConfigError
from slime.core.hf_config import HfConfig, num_experts_of
from slime.models.common.config import is_sparse

TRAIN_FORWARDS = 3
"""Cost of a training pass in forward passes: the forward pass itself, plus two for gradients of inputs and weights."""


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Multiply-adds of one layer's attention."""

    per_token: int
    per_pair: tuple[tuple[int | None, int], ...] = ()
    """(window in tokens or None, multiply-adds per query-key pair)."""


@dataclass(frozen=True, slots=True)
class FlopsModel:
    """The total cost of a model's layers."""

    per_token: float
    """FLOPs per token of all matrix products with weights, excluding the LM head."""
    per_logit: float
    """FLOPs per position of the LM head."""
    per_pair: tuple[tuple[int | None, float], ...]
    """(window in tokens or None, FLOPs per query-key pair, summed over all layers with that window)."""

    def forward(self, num_tokens: int, *, num_logits: int | None = None, causal: bool = True) -> float:
        """Returns the FLOPs of a forward pass over one sequence.

        `num_logits`: number of positions with logits (default: all). If `causal` is False, masked pairs count too.
        """
        pairs = 0.0
        for window, flops in self.per_pair:
            width = num_tokens if window is None else min(window, num_tokens)
            seen = width * (width + 1) / 2 + (num_tokens - width) * width
            pairs += flops * (seen if causal else num_tokens**2)
        logits = num_tokens if num_logits is None else num_logits
        return self.per_token * num_tokens + self.per_logit * logits + pairs


def tflops_per_gpu(forward_flops: float, *, time_s: float, num_gpus: int, num_forwards: int = TRAIN_FORWARDS) -> float:
    """Returns TFLOP/s per GPU for the `perf/*_tflops` metrics, or 0 if `time_s` is 0.

    `forward_flops`: sum over all samples in the batch. `num_gpus`: number of GPUs that shared the work. `num_forwards`:
    1 for passes without gradients.
    """
    return num_forwards * forward_flops / (time_s * num_gpus) / 1e12 if time_s > 0 else 0.0


def decoder_flops(config: HfConfig, attention: Callable[[HfConfig, int], AttentionCost]) -> FlopsModel:
    """Returns the cost of a decoder with gated MLPs, dense or MoE. `attention` returns one layer's attention cost.

    The language model can be nested in `config` as `text_config`. Raises `ConfigError` if a key is missing.
    """
    config = config.get("text_config") or config
    try:
        layers = range(int(config["num_hidden_layers"]))
        costs = [attention(config, layer) for layer in layers]
        per_token = sum(cost.per_token for cost in costs) + sum(mlp_cost(config, layer) for layer in layers)
        per_logit = 2.0 * int(config["hidden_size"]) * int(config["vocab_size"])
    except KeyError as missing:
        raise ConfigError(f"config.json has no {missing}, which is required to compute FLOPs") from missing
    per_pair: dict[int | None, int] = {}
    for cost in costs:
        for window, multiply_adds in cost.per_pair:
            per_pair[window] = per_pair.get(window, 0) + multiply_adds
    return FlopsModel(2.0 * per_token, per_logit, tuple((window, 2.0 * cost) for window, cost in per_pair.items()))


def grouped_query_cost(config: HfConfig, layer: int) -> AttentionCost:
    heads, kv_heads, head_dim = head_sizes(config)
    projections = int(config["hidden_size"]) * head_dim * (2 * heads + 2 * kv_heads)
    return AttentionCost(projections, ((_window(config, layer), 2 * heads * head_dim),))


def head_sizes(config: HfConfig) -> tuple[int, int, int]:
    """Returns (number of query heads, number of KV heads, size of a head)."""
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    return heads, int(config.get("num_key_value_heads") or heads), head_dim


def _window(config: HfConfig, layer: int) -> int | None:
    """Returns this layer's window in tokens, or None for full attention."""
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    kind = kinds[layer] if kinds else "sliding_attention" if window and config.get("use_sliding_window", True) else None
    if kind not in (None, "full_attention", "sliding_attention"):
        raise ConfigError(f"config.json has layers of type {kind!r}, for which slime has no FLOPs formula")
    return int(window) if kind == "sliding_attention" and window else None


def mlp_cost(config: HfConfig, layer: int) -> int:
    """Returns the multiply-adds per token of a layer's MLP."""
    hidden = int(config["hidden_size"])
    num_experts = num_experts_of(config)
    if not is_sparse(config, layer):
        return 3 * hidden * int(config["intermediate_size"])
    size = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    shared = int(config.get("n_shared_experts") or 0) * size
    own = int(config.get("shared_expert_intermediate_size") or 0)  # Qwen MoE: separate size, plus a gate
    router = hidden * (num_experts + (own > 0))
    return 3 * hidden * (int(config["num_experts_per_tok"]) * size + shared + own) + router
