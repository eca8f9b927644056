"""Builds Megatron's config objects for the model, DDP and the optimizer from the resolved settings.

`args.megatron` maps Megatron's field names to values, after defaults and derivations.
`slime.settings.megatron.FIXED` lists the values that the trainer hard-codes: flags are checked against it when they are
parsed, and this module applies it.
"""

from __future__ import annotations

import dataclasses
import enum
import typing
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.core.hf_config import read_hf_config
from slime.core.topology import ParallelSizes
from slime.models.common.mtp import with_mtp
from slime.models.common.packed_attention import ALL_TO_ALL
from slime.settings.args import Args
from slime.settings.megatron import FIXED
from slime.settings.schema import flags_of_owner

_HELD = (
    *("optimizer_cpu_offload", "use_precision_aware_optimizer"),
    *("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "optimizer_offload_fraction"),
)
"""Settings that are read by slime's `adamw`, not by Megatron's optimizers."""


def fixed(config: type) -> dict[str, Any]:
    """Returns the fields of a Megatron config class that the trainer hard-codes, with their values."""
    names = {field.name for field in dataclasses.fields(config)}
    return {name: value for name, (value, _) in FIXED.items() if name in names}


def trained_config(args: Args) -> dict[str, Any]:
    """Returns the checkpoint's `config.json`, including the MTP layer if it is trained."""
    hf_config = read_hf_config(args.hf_checkpoint)
    return dict(with_mtp(hf_config)) if args.enable_mtp_training else hf_config


def training_dtype(megatron: Mapping[str, Any]) -> torch.dtype:
    """Returns float16 with `fp16`, bfloat16 with `bf16`, and float32 otherwise."""
    if megatron.get("fp16"):
        return torch.float16
    return torch.bfloat16 if megatron.get("bf16") else torch.float32


def transformer_config(megatron: Mapping[str, Any], architecture: Mapping[str, Any]) -> TransformerConfig:
    """Builds the model config. `architecture` comes from the model family, everything else from the settings."""
    sizes = ParallelSizes.of(megatron)
    dtype = training_dtype(megatron)
    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    values = config_kwargs(TransformerConfig, megatron)
    values.update((name, value) for name, value in architecture.items() if name in names)
    values.update(fixed(TransformerConfig))
    values.update(
        activation_func=torch.nn.functional.silu,
        # slime has its own expert layers and permutes their rows itself (`models.common.mlp`).
        moe_grouped_gemm=False,
        moe_permute_fusion=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        pipeline_dtype=dtype,
        # Without this, Megatron would divide gradients by the data-parallel size. slime's losses already include the
        # denominators of the whole step, so the gradient is a plain sum. slime's flag of this name does not set it.
        calculate_per_token_loss=True,
        virtual_pipeline_model_parallel_size=sizes.vp if sizes.vp > 1 else None,
        # Megatron also allows a list, one value per layer, and values that slime does not use.
        cp_comm_type=ALL_TO_ALL if values.get("cp_comm_type") == ALL_TO_ALL else None,
        mtp_num_layers=None,  # slime implements multi-token prediction
        fp8=None,  # slime multiplies in FP8 itself; Megatron's layers would need Transformer Engine
        experimental_attention_variant=None,  # slime has its own layers; Megatron's do not support context parallelism
    )
    if sizes.vp > 1:
        # With two stages, each is both the previous and the next stage of the other, which batched P2P would confuse.
        values.update(overlap_p2p_comm=True, batch_p2p_comm=False)
    config = TransformerConfig(**values)
    # Packed rows vary in length, so pipeline stages must send the shape first. This is set after validation, which
    # rejects it for Megatron's all-gather dispatcher; slime's dispatcher supports variable lengths.
    config.variable_seq_lengths = sizes.pp > 1
    return config


def ddp_config(megatron: Mapping[str, Any]) -> DistributedDataParallelConfig:
    """Builds the DDP config: gradients are summed in float32 and sharded for the distributed optimizer."""
    values = config_kwargs(DistributedDataParallelConfig, megatron)
    values.update(fixed(DistributedDataParallelConfig))
    return DistributedDataParallelConfig(**values)


def optimizer_config(megatron: Mapping[str, Any]) -> OptimizerConfig:
    """Builds the config of AdamW, sharded over data-parallel ranks, with float32 master weights and moments.

    With `--optimizer muon`, `slime.training.step.optimizer` updates the matrices before this AdamW.

    With `--optimizer-cpu-offload` or `--use-precision-aware-optimizer`, Megatron's optimizer sees only the parameters.
    `slime.training.step.adamw` manages their master weights and moments, because Megatron's own implementation requires
    Transformer Engine.
    """
    dtype = training_dtype(megatron)
    values = config_kwargs(OptimizerConfig, megatron)
    for name in ("timers", "params_dtype", *_HELD):
        values.pop(name, None)
    values.update(
        fixed(OptimizerConfig),
        optimizer="adam",
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        lr=float(megatron["lr"]),
        min_lr=float(megatron["min_lr"]),
    )
    config = OptimizerConfig(**values)
    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = any(bool(megatron.get(name)) for name in _HELD[:2])
    return config


def config_kwargs(cls: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keyword arguments for a Megatron config class from `args.megatron`, with dtypes and enums decoded.

    Settings that equal their default are omitted, so that Megatron can derive values from defaults, and so that a field
    with different defaults in two classes keeps each class's default.
    """
    hints = typing.get_type_hints(cls)
    stored = {flag.dest: flag for flag in flags_of_owner("megatron")}
    out: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.name not in settings:
            continue
        value, hint = settings[field.name], hints[field.name]
        base = next((a for a in typing.get_args(hint) if a is not type(None)), hint)
        decode: Callable[[Any], Any] = lambda v: v  # noqa: E731
        if base is torch.dtype:
            decode = lambda v: getattr(torch, v)  # noqa: E731
        elif isinstance(base, type) and issubclass(base, enum.Enum):
            decode = base.__getitem__
        elif typing.get_origin(base) is list:
            decode = list
        if value is not None:
            value = decode(value)
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        described_elsewhere = field.name in stored and stored[field.name].configs[:1] != (cls.__name__,)
        if described_elsewhere and settings[field.name] == stored[field.name].default:
            continue
        if value != default:
            out[field.name] = value
    return out
