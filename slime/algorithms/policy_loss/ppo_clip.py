"""Clipped policy losses: PPO (Schulman et al. 2017, arXiv:1707.06347) clips per token, GSPO per sequence.

Both support clip-higher (Yu et al. 2025, DAPO, arXiv:2503.14476), separate clip ranges below and above 1, and dual clip
(Ye et al. 2020, arXiv:1912.09729), which bounds the loss for negative advantages by -c * A, so that a large ratio
cannot dominate.
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
    eps_clip: float = opt(0.2, gt=0, le=1e9)
    """Lower clip range of the probability ratio: 1 - eps_clip (PPO, arXiv:1707.06347); from 1 on, no lower bound."""
    eps_clip_high: float = derived(lambda s: s.eps_clip, "eps_clip", gt=0, le=1e9)
    """Upper clip range: 1 + eps_clip_high (DAPO, arXiv:2503.14476). Default: eps_clip."""


@dataclass(frozen=True, kw_only=True)
class ClipSettings(ClipRange):
    eps_clip_c: float | None = opt(None, gt=1, le=1e9)
    """Dual-clip bound for negative advantages, > 1 (arXiv:1912.09729)."""


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float | None, eps_clip_c: float | None
) -> tuple[Tensor, Tensor]:
    """Returns (loss [R], 1.0 where it was clipped [R]). Ratios and advantages must be finite everywhere."""
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
    """Computes max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A) [R], then applies dual clip with `eps_clip_c`."""
    log_ratio, limited = clamped_log_ratio(log_probs, old_log_probs.detach(), mask, log_ratio_limit)
    loss, clipped = clipped_surrogate(
        log_ratio.exp(), unmasked(advantages.detach(), mask), eps_clip, eps_clip_high, eps_clip_c
    )
    return TokenLosses(loss, clipped, -log_ratio.detach(), limited.to(loss.dtype))


@POLICY_LOSSES.register("gspo")
@dataclass(frozen=True, kw_only=True)
class GroupSequencePolicyLoss(ClipSettings, PolicyLoss):
    """Group sequence policy optimization (Zheng et al. 2025, arXiv:2507.18071): clips whole sequences.

    The ratio of a sequence is the geometric mean of its token ratios, s = exp(mean over trained tokens of log r). All
    tokens of a sequence are clipped based on s. It is much closer to 1 than a token ratio, so the paper uses clip
    ranges of about 3e-4 and 4e-4.

    As in section 4.3, the ratio is implemented as sg(s) * pi / sg(pi), which has the value s and the gradient of the
    token ratio. With one advantage per sequence, the gradient of the loss is the same as with s. With per-token
    advantages (distillation, KL in the reward), each token keeps its own advantage instead of the sequence mean.
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
    """Computes max(-s A, -clip(s) A) [R] with the sequence ratio s and the token advantage A."""
    log_ratio, limited = clamped_log_ratio(log_probs, old_log_probs.detach(), mask, log_ratio_limit)
    own = log_ratio.detach()
    ratio = (sequences.spread(sequences.mean(own, mask)) + (log_ratio - own)).exp()
    loss, clipped = clipped_surrogate(ratio, unmasked(advantages.detach(), mask), eps_clip, eps_clip_high, eps_clip_c)
    return TokenLosses(loss, clipped, -log_ratio.detach(), limited.to(loss.dtype))
