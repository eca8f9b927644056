"""From resolved settings to Megatron's configuration objects: the model, data parallelism, the optimizer.

`args.megatron` maps Megatron's field names to values. Settings that would make the result wrong here, rather than slow,
are refused; those that need a package which is not installed (fusions of Apex or Transformer Engine) are off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.core.errors import ConfigError
from slime.training.schema import config_kwargs

SUPPORTED_ROPE = ("default", "linear", "llama3")
"""Rotary scalings that keep the attention scale at 1 and do not depend on the sequence length."""

_FORCED: dict[str, Any] = {
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "perform_initialization": False,
    "use_cpu_initialization": False,
    # Megatron divides gradients by the data-parallel size unless this is set; our losses already carry the denominators
    # of the whole step, so the sum over ranks is the gradient.
    "calculate_per_token_loss": True,
}


def training_dtype(megatron: Mapping[str, Any]) -> torch.dtype:
    """float16 with `fp16`, float32 with neither flag, else bfloat16."""
    if megatron.get("fp16"):
        return torch.float16
    return torch.bfloat16 if megatron.get("bf16") else torch.float32


def transformer_config(megatron: Mapping[str, Any], hf_config: Mapping[str, Any]) -> TransformerConfig:
    """The model's configuration: shape from the HF config, everything else from the settings.

    Raises `ConfigError` for a family, an activation or a parallelism that this release cannot train.
    """
    _refuse(megatron, hf_config)
    dtype = training_dtype(megatron)
    values = config_kwargs(TransformerConfig, megatron)
    values.update(_shape(hf_config))
    values.update(_FORCED)
    values.update(
        activation_func=torch.nn.functional.silu,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        pipeline_dtype=dtype,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
    )
    return TransformerConfig(**values)


def _shape(hf: Mapping[str, Any]) -> dict[str, Any]:
    heads = int(hf["num_attention_heads"])
    return {
        "num_layers": int(hf["num_hidden_layers"]),
        "hidden_size": int(hf["hidden_size"]),
        "ffn_hidden_size": int(hf["intermediate_size"]),
        "num_attention_heads": heads,
        "num_query_groups": int(hf.get("num_key_value_heads") or heads),
        "kv_channels": int(hf.get("head_dim") or int(hf["hidden_size"]) // heads),
        "layernorm_epsilon": float(hf["rms_norm_eps"]),
        "qk_layernorm": hf["model_type"] == "qwen3",
        "add_qkv_bias": bool(hf.get("attention_bias", hf["model_type"] == "qwen2")),
    }


def _refuse(megatron: Mapping[str, Any], hf: Mapping[str, Any]) -> None:
    family = hf.get("model_type")
    if family not in ("llama", "qwen2", "qwen3"):
        raise ConfigError(f"got a checkpoint of family {family!r}; this release trains llama, qwen2 and qwen3 (dense)")
    for name in ("pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"):
        if int(megatron.get(name) or 1) != 1:
            raise ConfigError(
                f"got {name}={megatron[name]}, because this release splits models by tensor parallelism only; set 1"
            )
    if hf.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"got hidden_act={hf['hidden_act']!r}; only silu is supported")
    if hf.get("mlp_bias") or (hf.get("attention_bias") and family != "qwen2"):
        raise ConfigError(
            "got a checkpoint with biases in its linear layers; only q, k, v biases of qwen2 are supported"
        )
    if hf.get("use_sliding_window"):
        raise ConfigError("got use_sliding_window=true; sliding windows are not supported by the trainer")
    if megatron.get("overlap_param_gather"):
        raise ConfigError(
            "got --overlap-param-gather, because weights are read between steps by the weight sync; leave it out"
        )


def rotary_parameters(hf: Mapping[str, Any]) -> tuple[str, float]:
    """(rope type, theta) of an HF config, in the spelling of transformers 4 and 5. Raises `ConfigError` if
    unsupported.
    """
    scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in SUPPORTED_ROPE:
        raise ConfigError(f"got rotary scaling {kind!r}; supported are {', '.join(SUPPORTED_ROPE)}")
    return kind, float(scaling.get("rope_theta") or hf.get("rope_theta") or 10000.0)


def ddp_config(megatron: Mapping[str, Any]) -> DistributedDataParallelConfig:
    """Gradients are summed in float32 over the data-parallel ranks, sharded for the distributed optimizer."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=bool(megatron.get("overlap_grad_reduce")),
        use_distributed_optimizer=True,
        bucket_size=megatron.get("ddp_bucket_size") or megatron.get("bucket_size"),
        average_in_collective=False,
    )


def learning_rate(megatron: Mapping[str, Any]) -> float:
    """`--lr`, by default 1e-6."""
    value = megatron.get("lr")
    return 1e-6 if value is None else float(value)


def optimizer_config(megatron: Mapping[str, Any]) -> OptimizerConfig:
    """Adam with decoupled weight decay, float32 master weights and moments, sharded over the data-parallel ranks."""
    dtype = training_dtype(megatron)
    values = config_kwargs(OptimizerConfig, megatron)
    for name in ("timers", "overlap_param_gather_with_optimizer_step", "params_dtype"):
        values.pop(name, None)
    if values.get("optimizer", "adam") != "adam":
        raise ConfigError(f"got --optimizer {values['optimizer']}; the distributed optimizer supports adam")
    values.update(
        optimizer="adam",
        use_distributed_optimizer=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        lr=learning_rate(megatron),
        min_lr=float(megatron.get("min_lr") or 0.0),
    )
    return OptimizerConfig(**values)
