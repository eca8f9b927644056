"""Corrections for tokens that another policy sampled: weights and masks, through which no gradient flows.

Several corrections may be combined. Each takes the policy loss from the previous one, in the order of
--off-policy-corrections. They multiply token losses and never change the denominators of the step.

To add a correction, derive a frozen dataclass from `Correction` and register it; its fields are its settings. A user's
own is selected by its path: `--off-policy-corrections tis my_pkg.mine`.
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
    """The input of a correction: a micro-batch with R response tokens. No tensor carries a gradient."""

    log_probs: Tensor
    """[R] log-probs under the current policy."""
    old_log_probs: Tensor
    """[R] log-probs under the old policy: the trainer's before the update, or the engine's with
    --use-rollout-logprobs."""
    trainer_log_probs: Tensor
    """[R] the trainer's log-probs before the update, under the whole distribution, like those that engines report."""
    rollout_log_probs: Tensor
    """[R] the engine's log-probs; meaningless where `sampled` is 0."""
    sampled: Tensor
    """[R] 1.0 where the token is trained and has an engine's log-prob."""
    mask: Tensor
    """[R] 1.0 where the token is trained."""
    advantages: Tensor
    """[R] advantage of each token."""
    sequences: Sequences
    """Maps tokens to samples."""
    lengths: tuple[int, ...]
    """Number of response tokens of each sample."""
    total_lengths: tuple[int, ...]
    """Number of tokens of each sample, prompt included."""
    args: Args
    """All settings, for users' functions."""
    log_ratio_limit: float = LOG_RATIO_LIMIT
    """Log-ratios are clamped to +- this value; 0 means no clamp."""


class Correction(ABC):
    """Changes the policy loss of tokens according to how they were sampled."""

    name: ClassVar[str]
    switch: ClassVar[str] = ""
    """The flag that enables it, for messages."""
    asked_by: ClassVar[str] = ""
    """The setting of that flag. Corrections with the same setting are alternatives."""
    place: ClassVar[int] = 0
    """Position among the corrections that flags enable, smallest first. --off-policy-corrections gives its own order.
    """
    needs_rollout_log_probs: ClassVar[bool] = True
    """Whether trained tokens must come with the engine's log-probs."""

    @classmethod
    def asked_for(cls, settings: Any) -> bool:
        """Whether flags enable it; used if --off-policy-corrections is not given."""
        return False

    @abstractmethod
    def apply(self, loss: Tensor, tokens: OffPolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """(policy loss [R] after this correction, metric name -> values [R]).

        Metrics are averaged over trained tokens; those with a name that ends in `_clamped` are counted.
        """

    def check(self, args: Args) -> str | None:
        """Why the settings cannot work together, checked before the start; None if they can."""
        return None


class MismatchCorrection(Correction):
    """A correction based on w = p(trainer, before the update) / p(engine)."""

    def check(self, args: Args) -> str | None:
        """Refuses the engine's log-probs as the old policy, because then every w is 1."""
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
