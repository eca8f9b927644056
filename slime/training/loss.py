"""The loss of one micro-batch, put together from `algorithms`, and the sums that become metrics.

Loss and metrics are sums of weight * value over tokens; the weights carry the denominators of the whole step, so the
numbers of a step are the sums over its micro-batches and ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slime.algorithms.kl import kl_estimate
from slime.algorithms.off_policy import truncated_weights
from slime.algorithms.policy_loss import clipped_policy_loss
from slime.algorithms.sft_loss import negative_log_likelihood
from slime.core.errors import ConfigError
from slime.training.micro_batch import MicroBatch

Sums = dict[str, Tensor]
"""Metric name -> this micro-batch's part of it, a float64 scalar on the device."""


def micro_batch_loss(
    args: Any,
    batch: MicroBatch,
    log_probs: Tensor,
    entropy: Tensor | None,
    *,
    old_log_probs: Tensor | None,
    ref_log_probs: Tensor | None,
) -> tuple[Tensor, Tensor, Sums]:
    """(scalar loss, per-token loss [R] detached, metric sums). log_probs, entropy, old and ref: [R] float32."""
    if args.loss_type == "sft_loss":
        token_loss = negative_log_likelihood(log_probs, batch.mask)
        return _weighted(token_loss, batch), token_loss.detach(), {"loss": _sum(token_loss, batch)}
    if args.loss_type != "policy_loss":
        raise ConfigError(f"got --loss-type {args.loss_type!r}; this release has policy_loss and sft_loss")
    return _policy(args, batch, log_probs, entropy, old_log_probs, ref_log_probs)


def _policy(
    args: Any,
    batch: MicroBatch,
    log_probs: Tensor,
    entropy: Tensor | None,
    old_log_probs: Tensor | None,
    ref_log_probs: Tensor | None,
) -> tuple[Tensor, Tensor, Sums]:
    recomputed = log_probs.detach() if old_log_probs is None else old_log_probs
    old = batch.rollout_log_probs if args.use_rollout_logprobs else recomputed
    result = clipped_policy_loss(
        log_probs,
        old,
        batch.advantages,
        batch.mask,
        eps_clip=args.eps_clip,
        eps_clip_high=args.eps_clip_high,
        eps_clip_c=args.eps_clip_c,
    )
    policy_loss = result.loss
    sums: Sums = {}
    if args.use_tis:
        tis = truncated_weights(
            recomputed, batch.rollout_log_probs, batch.sampled, clip=args.tis_clip, clip_low=args.tis_clip_low
        )
        policy_loss = policy_loss * tis.weight
        sums.update(tis=_sum(tis.raw, batch), tis_clipfrac=_sum(tis.truncated, batch))
    token_loss = policy_loss
    sums["pg_loss"] = _sum(policy_loss, batch)
    sums["pg_clipfrac"] = _sum(result.clipped, batch)
    sums["ppo_kl"] = _sum(result.old_minus_new, batch)
    sums["log_ratio_clamped"] = result.ratio_limited.double().sum()
    if entropy is not None:
        sums["entropy_loss"] = _sum(entropy, batch)
        if args.entropy_coef:
            token_loss = token_loss - args.entropy_coef * torch.where(
                batch.mask > 0, entropy, torch.zeros_like(entropy)
            )
    if ref_log_probs is not None:
        kl = kl_estimate(log_probs, ref_log_probs, batch.mask, args.kl_loss_type)
        token_loss = token_loss + args.kl_loss_coef * kl
        sums["kl_loss"] = _sum(kl, batch)
    sums["loss"] = _sum(token_loss, batch)
    return _weighted(token_loss, batch), token_loss.detach(), sums


def _weighted(values: Tensor, batch: MicroBatch) -> Tensor:
    # The mask has made masked values finite zeros already; 0 * NaN would be NaN.
    return (values * batch.weights).sum()


def _sum(values: Tensor, batch: MicroBatch) -> Tensor:
    kept = torch.where(batch.mask > 0, values.detach(), torch.zeros_like(values))
    return (kept.double() * batch.weights).sum()
