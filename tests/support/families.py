"""Tiny random checkpoints of every family, each written by the class of transformers, and its gradients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.core.batch import TrainBatch
from slime.core.engine_interface import is_installed
from tests.support.tiny import SHAPE, write_tokenizer

DEEP: dict[str, Any] = {**SHAPE, "num_hidden_layers": 4, "tie_word_embeddings": False}
"""Four layers: two kinds of layer on each of two pipeline stages."""
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 8,
}
SIGMOID_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
SOFTMAX_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
INDEXER = {"index_n_heads": 32, "index_head_dim": 16, "index_topk": 8}
"""With few heads, often none has a positive product. All such keys score zero, and transformers chooses any of them."""
DELTA = {
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}
SHARED = {"shared_expert_intermediate_size": 48}
DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
GLM_ATTENTION = {"head_dim": 16, "attention_bias": True, "partial_rotary_factor": 0.5}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 16, "rope_parameters": LLAMA3}),
    "llama_tied": ("Llama", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "mimo": ("Qwen2", {"rms_norm_eps": 1e-5}),
    "qwen3": ("Qwen3", {"head_dim": 32, "num_key_value_heads": 2}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 16, "mlp_only_layers": [1], **SOFTMAX_EXPERTS}),
    "qwen3_next": ("Qwen3Next", {**DELTA, **SOFTMAX_EXPERTS, **SHARED}),
    "qwen3_5": ("Qwen3_5", DELTA),
    "qwen3_5_moe": ("Qwen3_5Moe", {**DELTA, **SOFTMAX_EXPERTS, **SHARED}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **LATENT,
            **SIGMOID_EXPERTS,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "rope_parameters": YARN,
            "max_position_embeddings": 32,
        },
    ),
    "kimi_k2": (
        "DeepseekV3",
        {
            **LATENT,
            **SIGMOID_EXPERTS,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
            "rope_parameters": {**YARN, "beta_fast": 1.0},
            "max_position_embeddings": 32,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 16,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {k: v for k, v in YARN.items() if "mscale" not in k} | {"truncate": False},
            "max_position_embeddings": 32,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {
            "head_dim": 16,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "glm4": ("Glm4", GLM_ATTENTION),
    "glm4_moe": ("Glm4Moe", {**GLM_ATTENTION, **SIGMOID_EXPERTS, "use_qk_norm": True, "routed_scaling_factor": 1.5}),
    "glm4_moe_lite": ("Glm4MoeLite", {**LATENT, **SIGMOID_EXPERTS, **DENSE_FIRST}),
    "deepseek_v32": (
        "DeepseekV32",
        {
            **LATENT,
            **SIGMOID_EXPERTS,
            "n_routed_experts": 8,
            "num_experts": 8,  # transformers has both, and a default of 256
            "n_group": 2,
            "topk_group": 1,
            "rope_parameters": YARN,
            "max_position_embeddings": 32,
            **INDEXER,
        },
    ),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        {
            **LATENT,
            **SIGMOID_EXPERTS,
            **DENSE_FIRST,
            **INDEXER,
            "indexer_types": ["full", "shared", "full", "shared"],
            # the class of transformers 5.12 never rotates interleaved pairs in the indexer, that of 5.19 always does
            "indexer_rope_interleave": is_installed("transformers", ">=5.19"),
        },
    ),
}
"""Name -> (prefix of the classes in transformers, config beyond `DEEP`)."""
SYNCED: dict[str, dict[str, Any]] = {
    "DeepseekV3": {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "Glm4MoeLite": {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "GptOss": {"swiglu_limit": 7.0},
    "MiniMaxM2": {
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
    },
    "DeepseekV32": {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "GlmMoeDsa": {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}
"""Prefix of classes -> what published checkpoints say besides, which engines read and transformers does not write."""
RENAMED: dict[str, dict[str, Any]] = {
    "kimi_k2": {"model_type": "kimi_k2"},
    "mimo": {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]},
}
"""Family that transformers has under another name -> what its config.json says of its own."""
WITH_EXPERTS = tuple(name for name, (_, own) in FAMILIES.items() if "num_experts_per_tok" in own)


def new_model(name: str, seed: int = 0, **overrides: Any) -> Any:
    """A random float32 model of transformers' class, whose norms, biases and routers make mistakes visible."""
    import torch
    import transformers

    prefix, own = FAMILIES[name]
    text = "Text" if prefix.startswith("Qwen3_5") else ""
    config = getattr(transformers, f"{prefix}{text}Config")(**{**DEEP, **own, **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).to(torch.float32)
        zero_centred = name.startswith("qwen3_") and name != "qwen3_moe"
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            if key.endswith("e_score_correction_bias"):
                torch.nn.init.uniform_(tensor, -0.3, 0.3)
            elif key.endswith("A_log"):
                torch.nn.init.uniform_(tensor, -1.0, 1.0)
            elif key.endswith(("proj.bias", "proj_bias")):
                # Large ones saturate attention, whose gradients are then all rounding.
                torch.nn.init.uniform_(tensor, -0.5, 0.5)
            elif tensor.ndim == 1 and isinstance(tensor, torch.nn.Parameter):
                low = -0.5 if zero_centred and "linear_attn" not in key else 0.5
                torch.nn.init.uniform_(tensor, low, low + 1.0)
            elif key.endswith(("mlp.gate.weight", "mlp.router.weight")):
                torch.nn.init.normal_(tensor, std=0.5)
            elif "linear_attn.in_proj" in key or "indexer" in key:
                torch.nn.init.normal_(tensor, std=0.2)
    return model


def write_family(directory: Path, name: str, seed: int = 0, **overrides: Any) -> Path:
    """Writes a tiny checkpoint with its tokenizer; returns `directory`."""
    model = new_model(name, seed, **overrides)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    if "layer_types" in config and name.startswith("qwen"):
        config["full_attention_interval"] = config["layer_types"].index("full_attention") + 1
    if name == "minimax_m2":
        config["rotary_dim"] = int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"])
    path.write_text(json.dumps({**config, **SYNCED.get(FAMILIES[name][0], {}), **RENAMED.get(name, {})}, indent=2))
    return directory


def load_model(checkpoint: Path) -> Any:
    """What transformers reads from a folder, in float32, under the name that transformers has for its family."""
    import torch
    import transformers

    values = json.loads((checkpoint / "config.json").read_text())
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if (name := values.pop("model_type")) not in RENAMED:
        return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, **options)
    kind: Any = getattr(transformers, f"{FAMILIES[name][0]}ForCausalLM")
    return kind.from_pretrained(checkpoint, config=kind.config_class(**values), **options)


def reference(checkpoint: Path, batch: TrainBatch, scratch: Path) -> tuple[list[Any], dict[str, Any]]:
    """(log-probs [R] of each sample, checkpoint name -> gradient of the mean negative log-prob of trained tokens).

    transformers itself gives gradients their checkpoint names: a model that holds them is saved to `scratch`.
    """
    import torch
    from safetensors.torch import load_file

    model = load_model(checkpoint)
    log_probs = list(_log_probs(model, batch))
    masks = [torch.from_numpy(s.loss_mask) for s in batch.samples]
    loss = -sum((lp * m).sum() for lp, m in zip(log_probs, masks, strict=True)) / sum(m.sum() for m in masks)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(scratch)
    gradients = {k: v for file in sorted(scratch.glob("*.safetensors")) for k, v in load_file(file).items()}
    buffers = {k for k in gradients if k.endswith("e_score_correction_bias")}
    return [lp.detach().numpy() for lp in log_probs], {k: v for k, v in gradients.items() if k not in buffers}


def _log_probs(model: Any, batch: TrainBatch) -> Iterator[Any]:
    import torch

    for sample in batch.samples:
        tokens = torch.from_numpy(sample.tokens).long()
        log_probs = torch.log_softmax(model(tokens[None]).logits[0].float(), -1)
        first = sample.num_tokens - sample.response_length
        yield log_probs[first - 1 : -1].gather(1, tokens[first:, None]).squeeze(1)
