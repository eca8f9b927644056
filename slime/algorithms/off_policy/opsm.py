"""Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556).

A sequence with a negative advantage that the policy has moved away from, mean(log old - log policy) > delta, is left
out: pushing its tokens down further would be learning from what the policy no longer says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from slime.algorithms.log_ratio import LOG_RATIO_LIMIT, clamped_log_ratio, unmasked
from slime.algorithms.off_policy import CORRECTIONS, Correction, OffPolicyTokens
from slime.settings.fields import opt
from slime.settings.flags import BOUND

if TYPE_CHECKING:
    from torch import Tensor

    from slime.algorithms.sequences import Sequences


@CORRECTIONS.register("opsm")
@dataclass(frozen=True, kw_only=True)
class OffPolicySequenceMasking(Correction):
    """Leaves out drifted sequences with a negative advantage (`--use-opsm`)."""

    switch: ClassVar[str] = "--use-opsm"
    asked_by: ClassVar[str] = "use_opsm"
    place: ClassVar[int] = 40
    needs_rollout_log_probs: ClassVar[bool] = False

    opsm_delta: float = opt(1e-4, within=BOUND)
    """Largest mean of old minus current log-prob of such a sequence."""

    @classmethod
    def asked_for(cls, settings: Any) -> bool:
        """See `Correction`."""
        return bool(settings.use_opsm)

    def apply(self, loss: Tensor, tokens: OffPolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Correction`."""
        keep = opsm_mask(
            tokens.log_probs,
            tokens.old_log_probs,
            tokens.advantages,
            tokens.mask,
            tokens.sequences,
            delta=self.opsm_delta,
            log_ratio_limit=tokens.log_ratio_limit,
        )
        return loss * keep, {"opsm_clipfrac": 1.0 - keep}


def opsm_mask(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Sequences,
    *,
    delta: float,
    log_ratio_limit: float = LOG_RATIO_LIMIT,
) -> Tensor:
    """0.0 where the token's advantage is negative and its sequence's mean of old - new exceeds `delta`, else 1.0; [R].

    Pass the engine's log-probs as `old_log_probs` to measure the distance from the sampler instead.
    """
    log_ratio, _ = clamped_log_ratio(log_probs.detach(), old_log_probs.detach(), mask, log_ratio_limit)
    far = sequences.spread(sequences.mean(-log_ratio, mask)) > delta
    return (~(far & (unmasked(advantages, mask) < 0))).to(log_ratio.dtype)
