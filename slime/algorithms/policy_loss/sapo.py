"""Soft adaptive policy optimization (Gao et al. 2025, arXiv:2511.20347): a smooth gate instead of the hard clip.

f(r) = sigmoid(tau * (r - 1)) * 4 / tau, loss = -f(r) * A. At r = 1 the slope of f is 1, so the on-policy gradient is
the plain policy gradient. Away from 1, the slope decays as 4 * p * (1 - p), where p is the sigmoid. tau is larger for
negative advantages, which are less stable because they raise the logits of all other tokens in a large vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.algorithms.policy_loss import POLICY_LOSSES, PolicyLoss, PolicyTokens, TokenLosses
from slime.algorithms.token_losses import LOG_RATIO_LIMIT, clamped_log_ratio, unmasked
from slime.settings.fields import opt

if TYPE_CHECKING:
    from torch import Tensor


@POLICY_LOSSES.register("sapo")
@dataclass(frozen=True, kw_only=True)
class SoftAdaptivePolicyLoss(PolicyLoss):
    sapo_tau_positive: float = opt(1.0, gt=0, le=1_000)
    """Steepness of the SAPO gate for advantages > 0."""
    sapo_tau_negative: float = opt(1.05, gt=0, le=1_000)
    """Steepness of the SAPO gate for advantages <= 0."""

    def token_losses(self, tokens: PolicyTokens) -> TokenLosses:
        return sapo_loss(
            tokens.log_probs,
            tokens.old_log_probs,
            tokens.advantages,
            tokens.mask,
            tau_positive=self.sapo_tau_positive,
            tau_negative=self.sapo_tau_negative,
            log_ratio_limit=tokens.log_ratio_limit,
        )


def sapo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    log_ratio_limit: float = LOG_RATIO_LIMIT,
) -> TokenLosses:
    """Computes the loss [R], with `tau_negative` for A <= 0."""
    import torch

    log_ratio, limited = clamped_log_ratio(log_probs, old_log_probs.detach(), mask, log_ratio_limit)
    advantage = unmasked(advantages.detach(), mask)
    tau = torch.where(advantage > 0, torch.full_like(advantage, tau_positive), torch.full_like(advantage, tau_negative))
    loss = -torch.sigmoid(tau * (log_ratio.exp() - 1.0)) * 4.0 / tau * advantage
    return TokenLosses(loss, torch.zeros_like(loss), -log_ratio.detach(), limited.to(loss.dtype))
