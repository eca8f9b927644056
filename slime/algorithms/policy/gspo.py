"""Group sequence policy optimization (Zheng et al. 2025, arXiv:2507.18071): the clip decides about whole sequences.

The ratio of a sequence is the geometric mean of its tokens' ratios, s = exp(mean over trained tokens of log r), and
each of its tokens is clipped by it. s is much closer to 1 than a token's ratio: the paper's bounds are about 3e-4 and
4e-4.

The ratio has the form of section 4.3, sg(s) * pi / sg(pi): its value is s, and its gradient that of the token alone.
For one advantage per sequence the gradient is that of s; where tokens have advantages of their own (distillation, a KL
in the reward), each gets its own and not the mean of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.algorithms.log_ratio import LOG_RATIO_LIMIT, clamped_log_ratio, unmasked
from slime.algorithms.policy import POLICY_LOSSES, PolicyLoss, PolicyTokens, TokenLosses
from slime.algorithms.policy.clip import ClipSettings, clipped_surrogate

if TYPE_CHECKING:
    from torch import Tensor

    from slime.algorithms.sequences import Sequences


@POLICY_LOSSES.register("gspo")
@dataclass(frozen=True, kw_only=True)
class GroupSequencePolicyLoss(ClipSettings, PolicyLoss):
    """The ratio of each sequence is held near 1."""

    def token_losses(self, tokens: PolicyTokens) -> TokenLosses:
        """See `PolicyLoss`."""
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
    """max(-s A, -clip(s) A) [R], s the ratio of the token's sequence; arguments as in `clipped_policy_loss`.

    Advantages are per token; where they differ in sign inside a sequence, the clip follows the token's.
    """
    log_ratio, limited = clamped_log_ratio(log_probs, old_log_probs.detach(), mask, log_ratio_limit)
    own = log_ratio.detach()
    ratio = (sequences.spread(sequences.mean(own, mask)) + (log_ratio - own)).exp()
    loss, clipped = clipped_surrogate(ratio, unmasked(advantages.detach(), mask), eps_clip, eps_clip_high, eps_clip_c)
    return TokenLosses(loss, clipped, -log_ratio.detach(), limited.to(loss.dtype))
