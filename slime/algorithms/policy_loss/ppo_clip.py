"""Clipped policy losses: PPO (Schulman et al. 2017, arXiv:1707.06347) clips tokens, GSPO sequences.

Both have two refinements. Clip-higher (Yu et al. 2025, DAPO, arXiv:2503.14476): separate bounds below and above 1. Dual
clip (Ye et al. 2020, arXiv:1912.09729): for negative advantages the loss is at most -c * A, so a large ratio cannot
dominate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.algorithms.policy_loss import POLICY_LOSSES, PolicyLoss, PolicyTokens, TokenLosses
from slime.algorithms.token_losses import LOG_RATIO_LIMIT, clamped_log_ratio, unmasked
from slime.settings.fields import derived, opt

if TYPE_CHECKING:
    from torch import Tensor

    from slime.algorithms.token_losses import Sequences


@dataclass(frozen=True, kw_only=True)
class ClipRange:
    eps_clip: float = opt(0.2, gt=0, le=1)
    """Lower clip range of the probability ratio: 1 - eps_clip (PPO, arXiv:1707.06347)."""
    eps_clip_high: float = derived(lambda s: s.eps_clip, "eps_clip", gt=0, le=1e9)
    """Upper clip range: 1 + eps_clip_high (DAPO, arXiv:2503.14476). Default: eps_clip."""


@dataclass(frozen=True, kw_only=True)
class ClipSettings(ClipRange):
    eps_clip_c: float | None = opt(None, gt=1, le=1e9)
    """Dual clip bound for negative advantages, > 1 (arXiv:1912.09729)."""


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float | None, eps_clip_c: float | None
) -> tuple[Tensor, Tensor]:
    """Returns (loss [R], 1.0 where a clip took effect [R]). Ratios and advantages must be finite everywhere."""
    import torch

    high = eps_clip if eps_clip_high is None else eps_clip_high
    plain = -ratio * advantages
    bounded = -ratio.clamp(1.0 - eps_clip, 1.0 + high) * advantages
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if eps_clip_c is not None:
        ceiling = -eps_clip_c * advantages
        above = (advantages < 0) & (loss > ceiling)
        loss = torch.where(above, ceiling, loss)
        clipped = clipped | above
    return loss, clipped.to(loss.dtype)


@POLICY_LOSSES.register("ppo_clip")
@dataclass(frozen=True, kw_only=True)
class ClippedPolicyLoss(ClipSettings, PolicyLoss):
    def token_losses(self, tokens: PolicyTokens) -> TokenLosses:
        return clipped_policy_loss(
            tokens.log_probs,
            tokens.old_log_probs,
            tokens.advantages,
            tokens.mask,
            eps_clip=self.eps_clip,
            eps_clip_high=self.eps_clip_high,
            eps_clip_c=self.eps_clip_c,
            log_ratio_limit=tokens.log_ratio_limit,
        )


def clipped_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
    log_ratio_limit: float = LOG_RATIO_LIMIT,
) -> TokenLosses:
    """Computes max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A) [R], then the dual clip at `eps_clip_c` (> 1)."""
    log_ratio, limited = clamped_log_ratio(log_probs, old_log_probs.detach(), mask, log_ratio_limit)
    loss, clipped = clipped_surrogate(
        log_ratio.exp(), unmasked(advantages.detach(), mask), eps_clip, eps_clip_high, eps_clip_c
    )
    return TokenLosses(loss, clipped, -log_ratio.detach(), limited.to(loss.dtype))


@POLICY_LOSSES.register("gspo")
@dataclass(frozen=True, kw_only=True)
class GroupSequencePolicyLoss(ClipSettings, PolicyLoss):
    """Group sequence policy optimization (Zheng et al. 2025, arXiv:2507.18071): clips whole sequences.

    The ratio of a sequence is the geometric mean of its tokens' ratios, s = exp(mean over trained tokens of log r).
    Each of its tokens is clipped by s, which is much closer to 1 than a token's ratio: the paper's bounds are about
    3e-4 and 4e-4.

    The ratio has the form of section 4.3, sg(s) * pi / sg(pi): its value is s, and its gradient is the gradient of the
    token's ratio. With one advantage per sequence, the gradient of the loss equals the gradient with s. With an
    advantage per token (distillation, a KL in the reward), each token keeps its own advantage instead of the sequence's
    mean.
    """

    def token_losses(self, tokens: PolicyTokens) -> TokenLosses:
        return gspo_loss(
            tokens.log_probs,
            tokens.old_log_probs,
            tokens.advantages,
            tokens.mask,
            sequences=tokens.sequences,
            eps_clip=self.eps_clip,
            eps_clip_high=self.eps_clip_high,
            eps_clip_c=self.eps_clip_c,
            log_ratio_limit=tokens.log_ratio_limit,
        )


def gspo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    sequences: Sequences,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
    log_ratio_limit: float = LOG_RATIO_LIMIT,
) -> TokenLosses:
    """Computes max(-s A, -clip(s) A) [R], with s of the token's sequence and A of the token."""
    log_ratio, limited = clamped_log_ratio(log_probs, old_log_probs.detach(), mask, log_ratio_limit)
    own = log_ratio.detach()
    ratio = (sequences.spread(sequences.mean(own, mask)) + (log_ratio - own)).exp()
    loss, clipped = clipped_surrogate(ratio, unmasked(advantages.detach(), mask), eps_clip, eps_clip_high, eps_clip_c)
    return TokenLosses(loss, clipped, -log_ratio.detach(), limited.to(loss.dtype))
