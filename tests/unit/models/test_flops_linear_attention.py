"""FLOPs of gated delta nets: every weight is one multiply-add per token, and so is every entry of the state, thrice."""

from __future__ import annotations

import transformers

from slime.models import family_of

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}


def test_a_token_costs_the_weights_and_the_state() -> None:
    config = transformers.AutoConfig.for_model("qwen3_5_text", **SHAPE)
    model = transformers.AutoModelForCausalLM.from_config(config)
    weights = sum(p.numel() for n, p in model.named_parameters() if ".layers." in n and p.ndim > 1)
    flops = family_of(config.to_dict()).flops(config.to_dict())
    assert flops.per_token / 2 == weights + 3 * 3 * 6 * 8 * 12
    assert flops.per_pair == ((None, 2.0 * 2 * 4 * 24),), "pairs are those of the one layer with full attention"


def test_a_real_model_activates_what_its_name_says() -> None:
    """Qwen3-Next-80B-A3B."""
    config = transformers.AutoConfig.for_model("qwen3_next").to_dict()
    flops = family_of(config).flops(config)
    assert 3e9 < (flops.per_token + flops.per_logit) / 2 < 4.2e9
