"""Tiny Qwen3-Next and multimodal Qwen3.5 checkpoints of random weights, and their gradients under checkpoint names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.tiny import SHAPE, write_tokenizer

LINEAR: dict[str, Any] = {
    **SHAPE,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "full_attention_interval": 2,  # what SGLang reads
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


def write_qwen_next(directory: Path, family: str, *, tied: bool = False, **overrides: Any) -> Path:
    """A float32 checkpoint of "qwen3_next", "qwen3_5" or "qwen3_5_moe"; `overrides` are of the language model."""
    import safetensors.torch
    import torch
    import transformers

    with torch.random.fork_rng():
        torch.manual_seed(0)
        if family == "qwen3_next":
            config = transformers.Qwen3NextConfig(**LINEAR | EXPERTS | overrides, tie_word_embeddings=tied)
            model: Any = transformers.Qwen3NextForCausalLM(config)
        else:
            moe = family == "qwen3_5_moe"
            text = LINEAR | (EXPERTS if moe else {}) | {"tie_word_embeddings": tied} | overrides
            name = "Qwen3_5Moe" if moe else "Qwen3_5"
            config = getattr(transformers, f"{name}Config")(
                text_config=text, vision_config=VISION, tie_word_embeddings=tied
            )
            model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")) or (parameter.ndim == 1 and "norm" in name):
                torch.nn.init.uniform_(parameter, -0.5, 0.5)
            else:
                torch.nn.init.normal_(parameter, std=0.2 if "conv1d" in name else 0.08)
        model.save_pretrained(directory)
        if family == "qwen3_5_moe":  # as published: transformers would write the experts one by one
            safetensors.torch.save_file(model.state_dict(), directory / "model.safetensors", {"format": "pt"})
    write_tokenizer(directory)
    return directory
