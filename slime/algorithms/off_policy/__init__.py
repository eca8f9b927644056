"""Corrections for tokens that a different policy sampled: weights and masks without a gradient.

Several corrections may be combined, in the order of --off-policy-corrections: each receives the policy loss that the
previous correction returns. Corrections multiply token losses. They never change the denominators of the step, even if
they mask tokens.

To add a correction, derive a frozen dataclass from `Correction`, whose fields are its settings, and register it. To use
your own correction, pass its import path: `--off-policy-corrections tis my_pkg.mine`.
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
    """[R] the trainer's log-probs before the update, under the full distribution, like the log-probs that engines
    report."""
    rollout_log_probs: Tensor
    """[R] the engine's log-probs; meaningless where `sampled` is 0."""
    sampled: Tensor
    """[R] 1.0 for trained tokens that have a log-prob from an engine."""
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
    """Limit to whose +- log-ratios are clamped; 0: no clamp."""


class Correction(ABC):
    """Corrects the policy loss of tokens for how they were sampled."""

    name: ClassVar[str]
    switch: ClassVar[str] = ""
    """The flag that turns the correction on, for messages."""
    asked_by: ClassVar[str] = ""
    """The name of the setting behind `switch`. Corrections with the same setting are alternatives."""
    place: ClassVar[int] = 0
    """Order among the corrections that flags turn on, smallest first. --off-policy-corrections has its own order."""
    needs_rollout_log_probs: ClassVar[bool] = True
    """Whether trained tokens need the engine's log-probs."""

    @classmethod
    def asked_for(cls, settings: Any) -> bool:
        """Returns whether the correction's flag is on. Called if --off-policy-corrections is not given."""
        return False

    @abstractmethod
    def apply(self, loss: Tensor, tokens: OffPolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns (corrected policy loss [R], metric name -> values [R], to be averaged over trained tokens).

        Metrics named `*_clamped` are counts instead.
        """

    def check(self, args: Args) -> str | None:
        """Returns an error message if these settings contradict each other, else None. Called before the run starts."""
        return None


class MismatchCorrection(Correction):
    """A correction based on w = p(trainer, before the update) / p(engine)."""

    def check(self, args: Args) -> str | None:
        if not args.use_rollout_logprobs:
            return None
        return (
            "--use-rollout-logprobs contradicts --use-tis, --rejection-level and --get-mismatch-metrics, which compare "
            "the engine's log-probs with the trainer's; set only one of them"
        )


CORRECTIONS: Registry[Correction] = Registry(
    "off-policy correction",
    flag="--off-policy-corrections",
    package="slime.algorithms.off_policy",
    contract=Correction,
)
