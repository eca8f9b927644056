"""Laws of the FLOPs model: it equals what torch counts on real models, and what a causal mask leaves of it."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from slime.core.errors import ConfigError
from slime.models import FAMILIES, family_of
from slime.models.common.flops import FlopsModel, decoder_flops, grouped_query_cost, tflops_per_gpu

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
INDEXER = {"index_topk": 64, "index_head_dim": 16, "index_n_heads": 4}
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
ARCHITECTURES = {
    "dense": ("llama", {"num_key_value_heads": 4}),
    "grouped-query": ("qwen3", {"head_dim": 24}),
    "latent": ("deepseek_v3", {**LATENT, "q_lora_rank": 36}),
    "latent, whole query": ("deepseek_v3", {**LATENT, "q_lora_rank": None}),
    "experts": ("qwen3_moe", {**EXPERTS, "head_dim": 16, "mlp_only_layers": [1]}),
    "shared expert": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2}),
    "sparse": ("glm_moe_dsa", {**LATENT, "q_lora_rank": 36, **INDEXER}),
    "sparse, shared choice": (
        "glm_moe_dsa",
        {**LATENT, "q_lora_rank": 36, **INDEXER, "indexer_types": ["full", "shared", "full"]},
    ),
    "few experts": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def flops_of(config: dict) -> FlopsModel:
    """By the config's family; a model of none is counted as a plain decoder."""
    if config.get("model_type") in FAMILIES:
        return family_of(config).flops(config)
    return decoder_flops(config, grouped_query_cost)


def counted(kind: str, num_tokens: int) -> tuple[dict, int]:
    """(config, FLOPs that torch counts in a forward pass of the real model)."""
    family, own = ARCHITECTURES[kind]
    config = transformers.AutoConfig.for_model(family, **{**SHAPE, **own})
    config._experts_implementation = "eager"  # the batched one computes experts that no token visits
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randint(0, 96, (1, num_tokens)), use_cache=False)
    return config.to_dict(), counter.get_total_flops()


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("num_tokens", [16, 200])
def test_it_counts_what_torch_counts(kind: str, num_tokens: int) -> None:
    config, flops = counted(kind, num_tokens)
    assert flops_of(config).forward(num_tokens, causal=False) == pytest.approx(flops, rel=0.01)


def test_a_causal_mask_leaves_the_pairs_at_or_before_the_query() -> None:
    model = flops_of(SHAPE)
    ((_, pair),) = model.per_pair
    assert model.forward(7, causal=False) - model.forward(7) == pytest.approx(pair * (49 - 28))


@pytest.mark.parametrize("num_tokens", [3, 5, 40])
def test_a_window_counts_the_pairs_inside_it(num_tokens: int) -> None:
    window = 5
    config = {**SHAPE, "sliding_window": window, "layer_types": ["full_attention", *["sliding_attention"] * 2]}
    full, narrow = (dict(flops_of(config).per_pair)[w] for w in (None, window))
    assert narrow == 2 * full
    inside = sum(0 <= q - k < window for q in range(num_tokens) for k in range(num_tokens))
    removed = (num_tokens * (num_tokens + 1) / 2 - inside) * narrow
    assert flops_of(SHAPE).forward(num_tokens) - flops_of(config).forward(num_tokens) == removed


def test_the_head_counts_the_positions_it_is_applied_to() -> None:
    model = flops_of(SHAPE)
    assert model.forward(10) - model.forward(10, num_logits=3) == 7 * 2 * 64 * 96


def test_a_text_config_is_found() -> None:
    assert flops_of({"vision_config": {}, "text_config": SHAPE}) == flops_of(SHAPE)


def test_real_sizes_cost_two_operations_per_active_parameter() -> None:
    """DeepSeek-V3 activates 37e9 of its parameters (its report, arXiv 2412.19437)."""
    model = flops_of(transformers.AutoConfig.for_model("deepseek_v3").to_dict())
    assert (model.per_token + model.per_logit) / 2 == pytest.approx(37e9, rel=0.03)


@pytest.mark.parametrize(
    "config",
    [
        {k: v for k, v in SHAPE.items() if k != "hidden_size"},
        {**SHAPE, "layer_types": ["linear_attention"] * 3},
    ],
)
def test_what_is_not_modelled_is_refused(config: dict) -> None:
    with pytest.raises(ConfigError):
        flops_of(config)


def test_rate() -> None:
    assert tflops_per_gpu(2e12, time_s=3.0, num_gpus=2) == 1.0
    assert tflops_per_gpu(6e12, time_s=3.0, num_gpus=2, num_forwards=1) == 1.0
    assert tflops_per_gpu(1.0, time_s=0.0, num_gpus=1) == 0.0


def test_sparse_attention_counts_the_keys_that_are_chosen_and_scores_all() -> None:
    config = {**SHAPE, **LATENT, **INDEXER, "q_lora_rank": 36, "model_type": "glm_moe_dsa"}
    attention, indexer = (dict(flops_of(config).per_pair)[window] for window in (64, None))
    assert attention == 2 * 3 * 4 * (16 + 8 + 20)
    assert indexer == 2 * 3 * 4 * (16 + 1)
