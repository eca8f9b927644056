"""Corrections for tokens that another policy sampled: weights and masks without a gradient.

Several may act, in the order of --off-policy-corrections: each gets the policy loss of the one before. They multiply
token losses; the denominators of the step stay, whatever is masked.

To add a correction, derive a frozen dataclass from `Correction`, whose fields are its settings, and register it. A
user's own is named by its path: `--off-policy-corrections tis my_pkg.mine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from slime.algorithms.token_losses import LOG_RATIO_LIMIT
from slime.core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from slime.algorithms.token_losses import Sequences
    from slime.settings import Args


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicyTokens:
    """The columns of a micro-batch with R response tokens that a correction reads; none has a gradient."""

    log_probs: Tensor
    """[R] log-probs under the current policy."""
    old_log_probs: Tensor
    """[R] the old policy's log-probs: the trainer's before the update, or the engine's with --use-rollout-logprobs."""
    trainer_log_probs: Tensor
    """[R] the trainer's log-probs before the update, under the whole distribution, like those that engines report."""
    rollout_log_probs: Tensor
    """[R] the engine's log-probs; meaningless where `sampled` is 0."""
    sampled: Tensor
    """[R] 1.0 for trained tokens with an engine's log-prob."""
    mask: Tensor
    """[R] 1.0 where the token is trained."""
    advantages: Tensor
    """[R] advantage of each token."""
    sequences: Sequences
    lengths: tuple[int, ...]
    """Number of response tokens of each sample."""
    total_lengths: tuple[int, ...]
    """Number of tokens of each sample, prompt included."""
    args: Args
    """All settings, for users' functions."""
    log_ratio_limit: float = LOG_RATIO_LIMIT
    """Log-ratios are clamped to +- this; 0: no clamp."""


class Correction(ABC):
    """Changes the policy loss of tokens by how they were sampled."""

    name: ClassVar[str]
    switch: ClassVar[str] = ""
    """The flag that turns it on, for messages."""
    asked_by: ClassVar[str] = ""
    """The setting of that flag. Corrections with the same setting are alternatives."""
    place: ClassVar[int] = 0
    """Its place among corrections that flags turn on, smallest first. --off-policy-corrections has its own order."""
    needs_rollout_log_probs: ClassVar[bool] = True
    """Whether trained tokens need the engine's log-probs."""

    @classmethod
    def asked_for(cls, settings: Any) -> bool:
        """Whether its flag turns it on; used if --off-policy-corrections is not given."""
        return False

    @abstractmethod
    def apply(self, loss: Tensor, tokens: OffPolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """(corrected policy loss [R], metric name -> values [R], to be averaged over trained tokens).

        Metrics named `*_clamped` are counted instead.
        """

    def check(self, args: Args) -> str | None:
        """Why these settings cannot work together, as an error message; None if they can. Checked before the start."""
        return None


class MismatchCorrection(Correction):
    """A correction based on w = p(trainer, before the update) / p(engine)."""

    def check(self, args: Args) -> str | None:
        if not args.use_rollout_logprobs:
            return None
        return (
            "got --use-rollout-logprobs with --use-tis, --rejection-level or --get-mismatch-metrics, which compare "
            "them with the trainer's; give one of them"
        )


CORRECTIONS: Registry[Correction] = Registry(
    "off-policy correction",
    flag="--off-policy-corrections",
    package="slime.algorithms.off_policy",
    contract=Correction,
)
