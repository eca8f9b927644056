"""Group sequence policy optimization (Zheng et al. 2025, arXiv:2507.18071): the clip decides about whole sequences.

The ratio of a sequence is the geometric mean of its tokens' ratios, s = exp(mean over trained tokens of log r). It is
much closer to 1 than a token's: the paper's bounds are about 3e-4 and 4e-4.

It is taken in the token form (section 4.3): s_t = sg(s) pi_t / sg(pi_t) has the value of s, and the loss of a token has
that token's gradient. With one advantage per sequence this is the gradient of s itself; where advantages or corrections
differ between tokens (a KL in the reward, distillation), s would give each token the mean of all.
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
    """max(-s_t A_t, -clip(s_t) A_t) [R]; arguments as in `clipped_policy_loss`.

    Where advantages differ in sign inside a sequence (distillation), the clip follows the token's.
    """
    log_ratio, limited = clamped_log_ratio(log_probs, old_log_probs.detach(), mask, log_ratio_limit)
    fixed = log_ratio.detach()
    ratio = (sequences.spread(sequences.mean(fixed, mask)) + (log_ratio - fixed)).exp()
    loss, clipped = clipped_surrogate(ratio, unmasked(advantages.detach(), mask), eps_clip, eps_clip_high, eps_clip_c)
    return TokenLosses(loss, clipped, -log_ratio.detach(), limited.to(loss.dtype))
