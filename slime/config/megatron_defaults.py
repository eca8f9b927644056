"""Where slime's default differs from Megatron's, and what the trainer fixes: value and reason, shown by --explain."""

from __future__ import annotations

from typing import Any

FIXED: dict[str, tuple[Any, str]] = {
    "use_distributed_optimizer": (True, "checkpoints and weight sync are built on it"),
    "optimizer": ("adam", "the distributed optimizer supports adam"),
    "grad_reduce_in_fp32": (True, "sums of many micro-batches lose bits in bf16"),
    "average_in_collective": (False, "losses already carry the denominators of the whole step"),
    "hidden_dropout": (0.0, "dropout makes trainer and engine disagree"),
    "attention_dropout": (0.0, "dropout makes trainer and engine disagree"),
    "transformer_impl": ("local", "runs without Transformer Engine, on CPU and GPU alike"),
    "normalization": ("RMSNorm", "all supported families use it"),
    "gradient_accumulation_fusion": (False, "needs Apex"),
    "masked_softmax_fusion": (False, "attention is slime's own packed one"),
    "apply_rope_fusion": (False, "needs Transformer Engine"),
    "persist_layer_norm": (False, "the norm is slime's own"),
    "bias_activation_fusion": (False, "needs a GPU kernel that the local layers lack"),
    "bias_dropout_fusion": (False, "there is no dropout"),
    "perform_initialization": (False, "weights come from the checkpoint"),
    "use_cpu_initialization": (False, "weights come from the checkpoint"),
    "overlap_param_gather": (False, "the weight sync reads weights between steps"),
}
"""What the trainer of this release cannot do otherwise. A flag that says so is refused; the trainer reads it here."""

SLIME_DEFAULTS: dict[str, tuple[Any, str]] = {
    "lr": (1e-6, "a usual learning rate of RL on a pretrained model"),
    "min_lr": (0.0, "Megatron's launch default"),
    "lr_decay_style": ("constant", "RL has no natural end to decay to"),
    "bf16": (True, "the training dtype unless --fp16 or --no-bf16"),
    **FIXED,
}
