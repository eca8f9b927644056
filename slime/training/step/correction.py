"""Off-policy corrections of a micro-batch's policy loss: weights, rejection, drifted negatives, the user's function.

Corrections multiply token losses; the denominators stay those of the step, whatever is left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slime.algorithms.off_policy.importance import importance_weights
from slime.algorithms.off_policy.opsm import opsm_mask
from slime.algorithms.off_policy.rejection import rejection_mask
from slime.core.errors import HookError
from slime.settings.hooks import load_hook
from slime.training.step.micro_batch import MicroBatch


def corrected(
    args: Any, batch: MicroBatch, policy_loss: Tensor, log_probs: Tensor, recomputed: Tensor, whole: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """(policy loss [R] after corrections, metric name -> values [R]).

    log_probs [R]: the current ones, detached; recomputed [R]: the trainer's before the update; whole [R]: the same of
    the whole distribution, which engines report. Tokens that no engine sampled keep weight 1. Raises `HookError` if the
    user's function breaks its contract.
    """
    metrics: dict[str, Tensor] = {}
    pair = (whole, batch.rollout_log_probs, batch.sampled)
    limit = float(args.log_ratio_limit)
    if args.use_tis and args.custom_tis_function_path:
        policy_loss, metrics = _by_hook(args, batch, policy_loss, whole)
    elif args.use_tis or args.get_mismatch_metrics:
        weights = importance_weights(
            *pair,
            batch.sequences,
            level=args.tis_level,
            mode=args.tis_mode,
            low=args.tis_clip_low,
            high=args.tis_clip,
            log_ratio_limit=limit,
        )
        metrics = {
            "tis": weights.raw,
            "tis_clipfrac": weights.truncated,
            "tis_abs": (weights.raw - 1.0).abs(),
            "mismatch_clamped": weights.ratio_limited,
        }
        if args.use_tis:
            policy_loss = policy_loss * weights.weight
    if args.rejection_level:
        keep = rejection_mask(
            *pair,
            batch.sequences,
            level=args.rejection_level,
            low=args.rejection_low,
            high=args.rejection_high,
            veto=args.rejection_veto,
            log_ratio_limit=limit,
        )
        keep = torch.where(batch.sampled > 0, keep, torch.ones_like(keep))
        metrics["rejected"] = 1.0 - keep
        policy_loss = policy_loss * keep
    if args.use_opsm:
        old = batch.rollout_log_probs if args.use_rollout_logprobs else recomputed
        keep = opsm_mask(
            log_probs, old, batch.advantages, batch.mask, batch.sequences, delta=args.opsm_delta, log_ratio_limit=limit
        )
        metrics["opsm_clipfrac"] = 1.0 - keep
        policy_loss = policy_loss * keep
    return policy_loss, metrics


def _by_hook(args: Any, batch: MicroBatch, policy_loss: Tensor, whole: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """`--custom-tis-function-path`: lists per sample in, the changed loss, masks per sample and metrics [R] out."""
    result = load_hook(args.custom_tis_function_path, "tis")(
        args=args,
        pg_loss=policy_loss,
        train_log_probs=list(whole.split(batch.lengths)),
        rollout_log_probs=list(batch.rollout_log_probs.split(batch.lengths)),
        loss_masks=list(batch.mask.split(batch.lengths)),
        total_lengths=list(batch.total_lengths),
        response_lengths=list(batch.lengths),
    )
    flag = "--custom-tis-function-path"
    if not isinstance(result, tuple) or len(result) != 3:
        raise HookError(f"{flag}: got {type(result).__name__}; it returns (pg_loss, masks, metrics)")
    loss, masks, metrics = result
    if loss.shape != policy_loss.shape or [len(m) for m in masks] != list(batch.lengths):
        raise HookError(f"{flag}: got a loss of shape {list(loss.shape)} for {list(policy_loss.shape)} tokens")
    keep = torch.cat([torch.as_tensor(m) for m in masks]) if masks else torch.zeros_like(batch.mask)
    kept = (keep.to(batch.mask.device) > 0) & (batch.mask > 0)
    loss = torch.where(kept, loss, torch.zeros_like(loss))
    return loss, {str(name): torch.as_tensor(value).float() for name, value in metrics.items()}
