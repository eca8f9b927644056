"""Importance weights of a plugin's own, whose settings come from a file and are read from `args`."""

from __future__ import annotations

import torch

from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, slice_log_prob_with_cp


def compute_weights(
    args,
    *,
    pg_loss,
    train_log_probs,
    rollout_log_probs,
    loss_masks,
    total_lengths,
    response_lengths,
    **kwargs,
):
    """Truncated weights, and masks without tokens outside of bounds."""
    lengths = list(zip(total_lengths, response_lengths, strict=True))
    train = [all_gather_with_cp(one, *length) for one, length in zip(train_log_probs, lengths, strict=True)]
    rollout = [all_gather_with_cp(one, *length) for one, length in zip(rollout_log_probs, lengths, strict=True)]
    masks, weights, ratios = [], [], []
    for ours, theirs, mask in zip(train, rollout, loss_masks, strict=True):
        ratio = torch.exp(torch.clamp(ours - theirs, -20.0, 20.0)).detach()
        kept = (ratio >= args.rs_lower_bound) & (ratio <= args.rs_upper_bound) if args.use_rs else torch.ones_like(mask)
        masks.append(mask * kept.to(mask.dtype))
        weights.append(torch.clamp(ratio, args.tis_lower_bound, args.tis_upper_bound))
        ratios.append(ratio)
    weights = [slice_log_prob_with_cp(one, *length) for one, length in zip(weights, lengths, strict=True)]
    flat = torch.cat(weights, dim=0)
    metrics = {"mis_weight": flat.clone(), "mis_ratio": torch.cat(ratios, dim=0)}
    return pg_loss * flat, masks, metrics
