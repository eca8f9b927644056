"""Shapes of models, and batches with lengths like those of rollouts. Imports neither slime nor anything heavy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
_TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def _dense(hidden: int, intermediate: int, layers: int, heads: int, **other: Any) -> dict[str, Any]:
    return {
        **_QWEN3,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **other,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _dense(64, 160, 2, 4) | _TINY,
    "tiny-moe": _dense(64, 160, 2, 4)
    | _EXPERTS
    | _TINY
    | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "135m": _dense(576, 1536, 30, 9, num_key_value_heads=3)
    | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "head_dim": 64},
    "0.6b": _dense(1024, 3072, 28, 16),
    "4b": _dense(2560, 9728, 36, 32),
    "8b": _dense(4096, 12288, 36, 32, tie_word_embeddings=False),
    "32b": _dense(5120, 25600, 64, 64, tie_word_embeddings=False),
    **{
        name: _dense(2048, 6144, layers, 32, num_key_value_heads=4)
        | _EXPERTS
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
        for name, layers in (("30b-a3b-2l", 2), ("30b-a3b-6l", 6), ("30b-a3b", 48))
    },
}
"""Name -> config.json: SmolLM2-135M, Qwen3-0.6B to -32B, Qwen3-30B-A3B whole and cut to 2 or 6 layers, 2 tiny ones."""
SHAPES |= {"30b-a3b-6l-layers": SHAPES["30b-a3b-6l"] | {"vocab_size": 1024}}
"""The same six layers with hardly any output layer, which otherwise takes half of the time."""

GROUP_SIZE = 8
"""Samples per prompt."""


def lengths(num_samples: int, mean: int, *, longest: int, seed: int) -> npt.NDArray[np.int64]:
    """Returns the tokens of each sample [S], including the prompt. The mean is exactly `mean`, the maximum `longest`.

    The lengths are log-normal with a spread of 0.6, as for responses of one model to one kind of prompt: the longest
    tenth has a quarter of the tokens.
    """
    assert 16 <= mean <= longest, f"a mean of {mean} tokens with at most {longest}"
    raw = np.random.default_rng(seed).lognormal(0.0, 0.6, num_samples)
    low, high = 0.0, 16.0 * mean
    for _ in range(60):  # the scale at which the clipped lengths have that mean
        scale = (low + high) / 2
        below = np.clip(raw * scale, 16, longest).mean() < mean
        low, high = (scale, high) if below else (low, scale)
    out = np.clip(raw * high, 16, longest).astype(np.int64)
    missing = num_samples * mean - int(out.sum())
    for i in np.argsort(out):  # distributes the rounding remainder, shortest first
        step = int(np.clip(missing, 16 - out[i], longest - out[i]))
        out[i] += step
        missing -= step
    assert missing == 0, f"{missing} tokens left over"
    return out


def samples(
    num_samples: int, mean: int, *, longest: int, vocab_size: int, version: int, seed: int
) -> list[dict[str, Any]]:
    """Returns the fields of one batch's train samples: a prompt of an eighth of the mean, responses of unequal length,
    rewards of 0 or 1, every response token trained, sampled under weight version `version` by a nearly uniform policy.
    """
    rng = np.random.default_rng(seed)
    prompt = max(4, mean // 8)
    out = []
    for index, size in enumerate(lengths(num_samples, mean, longest=longest, seed=seed)):
        response = int(max(size - prompt, size // 2))
        out.append(
            {
                "tokens": rng.integers(0, vocab_size, int(size)).astype(np.int64),
                "loss_mask": np.ones(response, np.float32),
                "rollout_log_probs": rng.normal(-np.log(vocab_size), 0.1, response).astype(np.float32),
                "token_versions": np.full(response, version, np.int32),
                "reward": float(rng.integers(0, 2)),
                "group_index": index // GROUP_SIZE,
                "index": index,
                "truncated": bool(size == longest),
            }
        )
    return out
