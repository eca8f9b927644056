"""Your own code inside the trainer, on every rank.

python train.py ... --custom-megatron-before-train-step-hook-path examples.megatron_hooks:warm_up_again
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)

WARM_UP_STEPS = 2


def initialize(args: Any) -> None:
    """`--custom-megatron-init-path`: the ranks have joined; the model does not exist yet."""
    import torch

    torch.set_float32_matmul_precision("highest")


def before_log_prob(args: Any, model: list[Any], store_prefix: str) -> None:
    """`--custom-megatron-before-log-prob-hook-path`: called before a forward pass of the policy or another model."""
    logger.info("log-probs of %s, %d chunks", store_prefix.rstrip("_") or "policy", len(model))


def warm_up_again(
    args: Any, rollout_id: int, step_id: int, model: list[Any], optimizer: Any, opt_param_scheduler: Any
) -> None:
    """`--custom-megatron-before-train-step-hook-path`: makes the first optimizer steps of each rollout smaller."""
    for group in optimizer.param_groups:
        group["lr"] *= min(1.0, (step_id + 1) / WARM_UP_STEPS)
