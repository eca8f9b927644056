"""Divergence proximal policy optimization (Qi et al. 2026, arXiv:2602.04879): a bound on divergence, not on the ratio.

loss = -M * r * A, with M = 0 where the policies are further apart than the threshold, D > delta, and the update moves
them further apart (A > 0 and r > 1, or A < 0 and r < 1), else M = 1. No ratio is clipped.

D is the divergence of the old and the current policy with two outcomes, the sampled token (probability p under the old
policy, q under the current one) or any other:

    binary_tv   |p - q|
    binary_kl   p log(p / q) + (1 - p) log((1 - p) / (1 - q))

So a rare token may change its ratio a lot, and a likely one only a little. In the paper, the old policy is the one that
sampled, which is `--use-rollout-logprobs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, assert_never

from slime.algorithms.policy_loss import POLICY_LOSSES, PolicyLoss, PolicyTokens, TokenLosses
from slime.algorithms.token_losses import LOG_RATIO_LIMIT, clamped_log_ratio, unmasked
from slime.settings.fields import derived

if TYPE_CHECKING:
    from torch import Tensor

Divergence = Literal["binary_tv", "binary_kl"]
THRESHOLDS: dict[Divergence, float] = {"binary_tv": 0.15, "binary_kl": 0.05}
"""Default threshold of each divergence."""
NEARLY_CERTAIN = 1e-7
"""Probability of all other tokens, at least."""


@POLICY_LOSSES.register("dppo")
@dataclass(frozen=True, kw_only=True)
class DivergencePolicyLoss(PolicyLoss):
    dppo_divergence_type: Divergence = "binary_tv"
    """Divergence of the old and the current policy at a token: total variation or KL of the sampled token against all
    others (arXiv:2602.04879)."""
    dppo_divergence_threshold: float = derived(
        lambda s: THRESHOLDS[s.dppo_divergence_type],
        lambda s: f"dppo_divergence_type {s.dppo_divergence_type}",
        gt=0,
        le=1_000,
    )
    """A token whose divergence exceeds this has no gradient if its update would increase it. Default: 0.15 for
    binary_tv, 0.05 for binary_kl."""

    def token_losses(self, tokens: PolicyTokens) -> TokenLosses:
        return dppo_loss(
            tokens.log_probs,
            tokens.old_log_probs,
            tokens.advantages,
            tokens.mask,
            divergence_type=self.dppo_divergence_type,
            threshold=self.dppo_divergence_threshold,
            log_ratio_limit=tokens.log_ratio_limit,
        )


def binary_divergence(old: Tensor, new: Tensor, divergence_type: Divergence) -> Tensor:
    """Computes the divergence [R] of two outcomes from the log-probs [R] of the sampled token under both policies.

    Computed in float64, because 1 - p is all rounding where p is nearly 1. A probability counts as at most 1 - 1e-7:
    beyond that, the log-prob of a float32 model is rounding, and the KL to a probability of exactly 1 is infinite.
    """
    import torch

    log_p, log_q = old.double().clamp(max=-NEARLY_CERTAIN), new.double().clamp(max=-NEARLY_CERTAIN)
    if divergence_type == "binary_tv":
        return (log_p.exp() - log_q.exp()).abs()
    if divergence_type == "binary_kl":
        rest_p, rest_q = -torch.expm1(log_p), -torch.expm1(log_q)
        sampled = log_p.exp() * (log_p - log_q)
        return sampled + torch.xlogy(rest_p, rest_p) - torch.xlogy(rest_p, rest_q)
    assert_never(divergence_type)


def dppo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    divergence_type: Divergence = "binary_tv",
    threshold: float,
    log_ratio_limit: float = LOG_RATIO_LIMIT,
) -> TokenLosses:
    """Computes the loss [R]; 0, and without gradient, where the divergence exceeds `threshold` and would increase."""
    import torch

    log_ratio, limited = clamped_log_ratio(log_probs, old_log_probs.detach(), mask, log_ratio_limit)
    advantage = unmasked(advantages.detach(), mask)
    old, new = unmasked(old_log_probs.detach(), mask), unmasked(log_probs.detach(), mask)
    far = binary_divergence(old, new, divergence_type) > threshold
    moves_away = advantage * log_ratio.detach() > 0
    dropped = far & moves_away
    loss = torch.where(dropped, torch.zeros_like(log_ratio), -log_ratio.exp() * advantage)
    return TokenLosses(loss, dropped.to(loss.dtype), -log_ratio.detach(), limited.to(loss.dtype))
