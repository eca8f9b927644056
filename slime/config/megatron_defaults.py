"""Where slime's default differs from Megatron's: value and reason, both shown by --explain."""

from __future__ import annotations

from typing import Any

SLIME_DEFAULTS: dict[str, tuple[Any, str]] = {
    "lr": (1e-6, "a usual learning rate of RL on a pretrained model"),
    "min_lr": (0.0, "Megatron's launch default"),
    "lr_decay_style": ("constant", "RL has no natural end to decay to"),
    "bf16": (True, "the training dtype unless --fp16 or --no-bf16"),
    "use_distributed_optimizer": (True, "the optimizer that checkpoints and weight sync are built on"),
    "grad_reduce_in_fp32": (True, "gradients of many micro-batches lose bits in bf16"),
    "hidden_dropout": (0.0, "dropout makes trainer and engine disagree"),
    "attention_dropout": (0.0, "dropout makes trainer and engine disagree"),
    "clip_grad": (1.0, "Megatron's default, stated here because RL depends on it"),
    "transformer_impl": ("local", "runs without Transformer Engine, on CPU and GPU alike"),
    "variable_seq_lengths": (True, "samples differ in length and are packed"),
    "normalization": ("RMSNorm", "all supported families use it"),
    "gradient_accumulation_fusion": (False, "needs Apex"),
    "check_for_nan_in_grad": (False, "slime checks loss and gradient itself and names the samples"),
}
