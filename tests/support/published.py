"""The sizes of published models, in the spelling of their config.json, and how many parameters they have."""

from __future__ import annotations

from typing import Any

_TOKENS: dict[str, Any] = {"hidden_act": "silu", "torch_dtype": "bfloat16", "attention_dropout": 0.0, "use_cache": True}
_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "topk_method": "noaux_tc", "norm_topk_prob": True}
_DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "full_attention_interval": 4,
}


def _sizes(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        **_TOKENS,
        "hidden_size": hidden,
        "rms_norm_eps": 1e-5,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        **more,
    }


def _routed(experts: int, chosen: int, size: int, **more: Any) -> dict[str, Any]:
    return {"num_experts_per_tok": chosen, "moe_intermediate_size": size, "n_routed_experts": experts, **more}


_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
_KIMI_YARN = {**_YARN, "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0}
_GPT_OSS_YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "rope_type": "yarn",
    "truncate": False,
}
_LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_GLM = {"partial_rotary_factor": 0.5, "eos_token_id": [151329, 151336, 151338], "rope_scaling": None}
_GLM_EXPERTS = {
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 3,
}
_NO_WINDOW = {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}
_LLAMA_8B = _sizes(4096, 14336, 32, 32, 8, 128256, model_type="llama", rope_scaling=_LLAMA3, rope_theta=500000.0)
_SOFTMAX = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False}
_QWEN3_5 = {
    **_DELTA,
    "head_dim": 256,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
}

_DEEPSEEK_V3 = (
    _sizes(7168, 18432, 61, 128, 128, 129280, model_type="deepseek_v3", rope_scaling=_YARN, rope_theta=10000)
    | _routed(256, 8, 2048, n_shared_experts=1, n_group=8, topk_group=4, first_k_dense_replace=3, **_LATENT)
    | {"q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128, "scoring_func": "sigmoid"}
    | {"num_nextn_predict_layers": 1, "quantization_config": _FP8, "routed_scaling_factor": 2.5}
)
SYNCED: dict[str, tuple[dict[str, Any], float]] = {
    "SmolLM2-135M": (_sizes(576, 1536, 30, 9, 3, 49152, model_type="llama", tie_word_embeddings=True), 0.1345),
    "Llama-3.1-8B": (_LLAMA_8B, 8.030),
    "Llama-3.2-1B": (
        {
            **_LLAMA_8B,
            "head_dim": 64,
            "hidden_size": 2048,
            "rms_norm_eps": 1e-5,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "tie_word_embeddings": True,
        },
        1.236,
    ),
    "Qwen2.5-7B": (_sizes(3584, 18944, 28, 28, 4, 152064, model_type="qwen2", **_NO_WINDOW), 7.616),
    "Qwen3-30B-A3B": (
        _sizes(2048, 6144, 48, 32, 4, 151936, model_type="qwen3_moe", head_dim=128, num_experts=128, **_SOFTMAX)
        | {"num_experts_per_tok": 8, "moe_intermediate_size": 768},
        30.53,
    ),
    "Qwen3-Next-80B-A3B": (
        _sizes(2048, 5120, 48, 16, 2, 151936, model_type="qwen3_next", head_dim=256, num_experts=512, **_SOFTMAX)
        | {"num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, **_DELTA}
        | {"partial_rotary_factor": 0.25, "rope_theta": 10000000},
        79.67,
    ),
    "Qwen3.5-35B-A3B": (
        {
            "model_type": "qwen3_5_moe",
            "tie_word_embeddings": False,
            "text_config": _sizes(2048, 512, 40, 16, 2, 248320, model_type="qwen3_5_moe_text", **_QWEN3_5),
        },
        34.66,
    ),
    "DeepSeek-V3": (_DEEPSEEK_V3, 671.03),
    "DeepSeek-V3.2": (
        _DEEPSEEK_V3 | {"model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048},
        671.88,
    ),
    "Kimi-K2-Instruct": (
        _sizes(7168, 18432, 61, 64, 64, 163840, model_type="kimi_k2", rope_scaling=_KIMI_YARN, rope_theta=50000.0)
        | _routed(384, 8, 2048, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1, **_LATENT)
        | {"q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128, "scoring_func": "sigmoid"}
        | {"num_nextn_predict_layers": 0, "quantization_config": _FP8, "routed_scaling_factor": 2.827},
        1026.41,
    ),
    "MiMo-7B-RL": (
        _sizes(4096, 11008, 36, 32, 8, 151680, model_type="mimo", head_dim=128, attention_bias=True, **_NO_WINDOW)
        | {"rope_theta": 640000, "num_nextn_predict_layers": 1},
        7.6226,
    ),
    "MiniMax-M2.5": (
        _sizes(3072, 1536, 62, 48, 8, 200064, model_type="minimax_m2", head_dim=128, rope_theta=5000000)
        | {"num_local_experts": 256, "num_experts_per_tok": 8, "rotary_dim": 64, "quantization_config": _FP8}
        | {"use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True, "scoring_func": "sigmoid"},
        228.7,
    ),
    "gpt-oss-20b": (
        _sizes(2880, 2880, 24, 64, 8, 201088, model_type="gpt_oss", head_dim=64, attention_bias=True, rope_theta=150000)
        | {"num_local_experts": 32, "num_experts_per_tok": 4, "swiglu_limit": 7.0, "sliding_window": 128}
        | {"layer_types": ["sliding_attention", "full_attention"] * 12, "rope_scaling": _GPT_OSS_YARN},
        20.9148,
    ),
    "GLM-4-9B-0414": (
        _sizes(4096, 13696, 40, 32, 2, 151552, model_type="glm4", head_dim=128, attention_bias=False, **_GLM),
        9.400,
    ),
    "GLM-4.5": (
        _sizes(5120, 12288, 92, 96, 8, 151552, model_type="glm4_moe", head_dim=128, attention_bias=True, **_GLM)
        | _routed(160, 8, 1536, **_GLM_EXPERTS)
        | {"use_qk_norm": True, "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5},
        352.80,
    ),
    "GLM-4.7-Flash": (
        _sizes(2048, 10240, 47, 20, 20, 154880, model_type="glm4_moe_lite", attention_bias=False, rope_scaling=None)
        | _routed(64, 4, 1536, **{**_GLM_EXPERTS, **_LATENT, "first_k_dense_replace": 1})
        | {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "num_nextn_predict_layers": 1},
        29.94,
    ),
    "GLM-5": (
        _sizes(6144, 12288, 78, 64, 64, 154880, model_type="glm_moe_dsa", head_dim=64, attention_bias=False)
        | _routed(256, 8, 2048, **{**_GLM_EXPERTS, **_LATENT})
        | {"q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "num_nextn_predict_layers": 1}
        | {"index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048, "indexer_rope_interleave": True}
        | {"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}},
        743.91,
    ),
}
"""Name -> (what its config.json says, 10^9 parameters of the language model without layers of multi-token prediction,
a tied output layer counted once)."""
