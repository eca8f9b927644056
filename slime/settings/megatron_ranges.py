"""What numbers of Megatron's flags may be, where Megatron says it late, in an assertion, or not at all."""

from __future__ import annotations

from collections.abc import Mapping

from slime.settings.fields import Range

_NOT_NEGATIVE = Range(ge=0)
_SIZE = Range(ge=1)

RANGES: Mapping[str, Range] = {
    **dict.fromkeys(("lr", "min_lr", "lr_warmup_init", "decoupled_lr", "decoupled_min_lr"), _NOT_NEGATIVE),
    **dict.fromkeys(("weight_decay", "start_weight_decay", "end_weight_decay", "clip_grad"), _NOT_NEGATIVE),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), Range(ge=0, lt=1)),
    "adam_eps": Range(gt=0),
    "optimizer_offload_fraction": Range(ge=0, le=1),
    "lr_warmup_fraction": Range(ge=0, le=1),
    "lr_warmup_iters": _NOT_NEGATIVE,
    "lr_wsd_decay_iters": _SIZE,
    "lr_decay_iters": _SIZE,
    **dict.fromkeys(
        ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        _SIZE,
    ),
    **dict.fromkeys(("expert_model_parallel_size", "virtual_pipeline_model_parallel_size"), _SIZE),
}
"""Setting -> its range; checked where it is given."""
