"""The loss of one micro-batch, put together from `algorithms`, and the sums that become metrics.

Loss and metrics are sums of weight * value over tokens; the weights carry the denominators of the whole step, so the
numbers of a step are the sums over its micro-batches and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from slime.algorithms.kl import kl_estimate
from slime.algorithms.log_ratio import unmasked
from slime.algorithms.policy.cispo import cispo_loss
from slime.algorithms.policy.clip import clipped_policy_loss
from slime.algorithms.policy.gspo import gspo_loss
from slime.algorithms.policy.outcome import PolicyLoss
from slime.algorithms.policy.sapo import sapo_loss
from slime.algorithms.sft_loss import negative_log_likelihood
from slime.algorithms.value_loss import value_loss
from slime.core.errors import HookError
from slime.settings.hooks import load_hook
from slime.training.model.log_probs import TokenScores
from slime.training.step.correction import corrected
from slime.training.step.micro_batch import MicroBatch

Sums = dict[str, Tensor]
"""Metric name -> this micro-batch's part of it, a float64 scalar on the device."""


@dataclass(frozen=True, slots=True)
class LossParts:
    """The loss of one micro-batch."""

    loss: Tensor
    """Scalar; the sum over micro-batches and ranks is the loss of the step."""
    token_loss: Tensor
    """[R] detached, before weights."""
    sums: Sums


def is_cut(args: Any) -> bool:
    """Whether tokens are sampled from a part of the vocabulary only (`--rollout-top-p`, `--rollout-top-k`)."""
    return bool(args.loss_type != "sft_loss" and (args.rollout_top_p < 1.0 or args.rollout_top_k > 0))


def micro_batch_loss(args: Any, batch: MicroBatch, scores: TokenScores) -> LossParts:
    """Loss of the policy. Raises `HookError` if a user's function breaks its contract."""
    log_probs = scores.log_probs
    if args.loss_type == "sft_loss":
        token_loss = negative_log_likelihood(log_probs, batch.mask)
        return LossParts(weighted(token_loss, batch), token_loss.detach(), {"loss": weighted_sum(token_loss, batch)})
    if args.loss_type == "custom_loss":
        return _custom(args, batch, log_probs)
    return _policy(args, batch, scores)


def micro_batch_value_loss(args: Any, batch: MicroBatch, values: Tensor) -> LossParts:
    """Loss of the critic. values: [R]."""
    assert batch.old_values is not None and batch.returns is not None, "the critic needs old values and returns"
    loss, clipped = value_loss(values, batch.old_values, batch.returns, batch.mask, value_clip=args.value_clip)
    sums = {
        "value_loss": weighted_sum(loss, batch),
        "value_clipfrac": token_mean(clipped, batch),
        "values": token_mean(values, batch),
    }
    return LossParts(weighted(loss, batch), loss.detach(), sums)


def policy_outcome(args: Any, batch: MicroBatch, log_probs: Tensor, old: Tensor) -> PolicyLoss:
    """The loss of `--policy-loss` per token."""
    given = (log_probs, old, batch.advantages, batch.mask)
    limit = float(args.log_ratio_limit)
    clip = {
        "eps_clip": args.eps_clip,
        "eps_clip_high": args.eps_clip_high,
        "log_ratio_limit": limit,
        "eps_clip_c": args.eps_clip_c,
    }
    if args.policy_loss == "gspo":
        return gspo_loss(*given, sequences=batch.sequences, **clip)
    if args.policy_loss == "cispo":
        bounds = {"clip_low": args.cispo_clip_low, "clip_high": args.cispo_clip_high}
        return cispo_loss(*given, log_ratio_limit=limit, **bounds)
    if args.policy_loss == "sapo":
        taus = {"tau_positive": args.sapo_tau_positive, "tau_negative": args.sapo_tau_negative}
        return sapo_loss(*given, log_ratio_limit=limit, **taus)
    assert args.policy_loss == "ppo_clip", f"no policy loss {args.policy_loss}"
    return clipped_policy_loss(*given, **clip)


def _policy(args: Any, batch: MicroBatch, scores: TokenScores) -> LossParts:
    log_probs, entropy = scores.log_probs, scores.entropy
    recomputed = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
    old = batch.rollout_log_probs if args.use_rollout_logprobs else recomputed
    result = policy_outcome(args, batch, log_probs, old)
    # Engines report the whole distribution: what is compared with them is, too.
    whole = recomputed
    if is_cut(args):
        whole = scores.full_log_probs if batch.old_full_log_probs is None else batch.old_full_log_probs
    policy_loss, sums = corrected(args, batch, result.loss, log_probs.detach(), recomputed, whole)
    if is_cut(args):
        sums["top_p_outside"] = scores.outside.to(log_probs.dtype)
    counts = {name: sums.pop(name).double().sum() for name in tuple(sums) if name.endswith("_clamped")}
    sums = {name: token_mean(value, batch) for name, value in sums.items()} | counts
    sums["log_ratio_clamped"] = result.ratio_limited.double().sum()
    sums["pg_clipfrac"] = token_mean(result.clipped, batch)
    sums["ppo_kl"] = token_mean(result.old_minus_new, batch)
    sums["ois"] = token_mean((-result.old_minus_new).exp(), batch)
    sums["log_probs"] = token_mean(log_probs, batch)
    sums["rollout_log_probs"] = token_mean(batch.rollout_log_probs * batch.sampled, batch)
    sums["pg_loss"] = weighted_sum(policy_loss, batch)
    extra = torch.zeros_like(policy_loss)
    if entropy is not None:
        sums["entropy_loss"] = token_mean(entropy, batch)
        if args.entropy_coef:
            extra = extra - args.entropy_coef * unmasked(entropy, batch.mask)
    if args.use_kl_loss:
        assert batch.ref_log_probs is not None, "a KL loss needs reference log-probs"
        kl = kl_estimate(
            log_probs,
            batch.ref_log_probs,
            batch.mask,
            args.kl_loss_type,
            old_log_probs=old if args.use_unbiased_kl else None,
            log_ratio_limit=float(args.log_ratio_limit),
        )
        extra = extra + args.kl_loss_coef * kl
        sums["ref_log_probs"] = token_mean(batch.ref_log_probs, batch)
        sums["kl_loss"] = weighted_sum(kl, batch)
    token_loss = policy_loss + extra
    sums["loss"] = weighted_sum(token_loss, batch)
    if not args.custom_pg_loss_reducer_function_path:
        return LossParts(weighted(token_loss, batch), token_loss.detach(), sums)
    reduced = _reduced(args, batch, policy_loss)
    loss = reduced + weighted(extra, batch)
    sums.update(loss=loss.detach().double(), pg_loss=reduced.detach().double())
    return LossParts(loss, token_loss.detach(), sums)


def _reduced(args: Any, batch: MicroBatch, policy_loss: Tensor) -> Tensor:
    """The policy loss by `--custom-pg-loss-reducer-function-path`, a sum over samples, over the step's executions."""
    build = load_hook(args.custom_pg_loss_reducer_function_path, "pg_loss_reducer")
    masks = list(batch.mask.split(batch.lengths))
    reduce = build(list(batch.total_lengths), list(batch.lengths), masks, args.loss_aggregation == "token_mean")
    return _scalar(reduce(policy_loss), batch, policy_loss, "--custom-pg-loss-reducer-function-path") * batch.unit


def _custom(args: Any, batch: MicroBatch, log_probs: Tensor) -> LossParts:
    """`--custom-loss-function-path`: the batch as a dict, and a sum that carries the denominators of the step."""
    loss_of = load_hook(args.custom_loss_function_path, "loss")
    data = {field.name: getattr(batch, field.name) for field in fields(batch)}
    data.update(loss_masks=list(batch.mask.split(batch.lengths)), response_lengths=list(batch.lengths))

    def sum_of_sample_mean(values: Tensor) -> Tensor:
        return weighted(unmasked(values, batch.mask), batch)

    loss, metrics = loss_of(args, data, log_probs, sum_of_sample_mean)
    loss = _scalar(loss, batch, log_probs, "--custom-loss-function-path")
    if not isinstance(metrics, dict) or not all(isinstance(v, Tensor) and v.numel() == 1 for v in metrics.values()):
        raise HookError("--custom-loss-function-path: got metrics that are no dict of scalar tensors")
    device = log_probs.device
    sums = {name: value.detach().to(device, torch.float64).reshape(()) for name, value in metrics.items()}
    sums["loss"] = loss.detach().double()
    # A non-finite loss of the user's function cannot be traced to a token: all of the micro-batch is suspect.
    return LossParts(loss, loss.detach().expand_as(log_probs), sums)


def _scalar(value: Any, batch: MicroBatch, source: Tensor, flag: str) -> Tensor:
    """A user's loss, checked. Every rank goes backward, or others would wait for it: also from a dummy micro-batch."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise HookError(f"{flag}: got {type(value).__name__}; the loss is a tensor with one number")
    if source.requires_grad and not value.requires_grad and bool((batch.mask > 0).any()):
        raise HookError(f"{flag}: got a loss without a gradient for trained tokens; make it from the log-probs")
    return value.to(source.device).reshape(()) + source.sum() * 0.0


def weighted(values: Tensor, batch: MicroBatch) -> Tensor:
    """The sum over tokens, differentiable. Masked values must be finite zeros already: 0 * NaN would be NaN."""
    return (values * batch.weights).sum()


def weighted_sum(values: Tensor, batch: MicroBatch) -> Tensor:
    """A part of the loss as a metric: detached, float64, whatever stands at masked positions."""
    return (unmasked(values.detach(), batch.mask).double() * batch.weights).sum()


def token_mean(values: Tensor, batch: MicroBatch) -> Tensor:
    """This micro-batch's part of a mean over the trained tokens of the step: detached, float64."""
    return (unmasked(values.detach(), batch.mask).double() * batch.shares).sum()
