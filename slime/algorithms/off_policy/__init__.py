"""Off-policy corrections: detached weights and masks for tokens that a different policy sampled.

Corrections multiply token losses and can be combined. They run in the order of --off-policy-corrections, each on the
loss returned by the previous one. They never change the denominators of the step, even if they mask tokens.

To add a correction, derive a frozen dataclass from `Correction` and register it. Its fields become settings. Your own
correction is selected by its import path, `--off-policy-corrections tis my_pkg.mine`.
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
    """A correction's input for a micro-batch with R response tokens. No tensor has a gradient."""

    log_probs: Tensor
    """[R] log-probs under the current policy."""
    old_log_probs: Tensor
    """[R] log-probs under the old policy: the trainer's before the update, or the engine's (--use-rollout-logprobs)."""
    trainer_log_probs: Tensor
    """[R] the trainer's log-probs before the update, under the full distribution, comparable to the engine's."""
    rollout_log_probs: Tensor
    """[R] the engine's log-probs; undefined where `sampled` is 0."""
    sampled: Tensor
    """[R] 1.0 for trained tokens with an engine log-prob."""
    mask: Tensor
    """[R] 1.0 where the token is trained."""
    advantages: Tensor
    """[R] advantage of each token."""
    sequences: Sequences
    lengths: tuple[int, ...]
    """Number of response tokens of each sample."""
    total_lengths: tuple[int, ...]
    """Number of tokens of each sample, including the prompt."""
    args: Args
    """All settings, for users' functions."""
    log_ratio_limit: float = LOG_RATIO_LIMIT
    """Log-ratios are clamped to +- this limit; 0 disables the clamp."""


class Correction(ABC):
    """Corrects the policy loss for tokens that a different policy sampled."""

    name: ClassVar[str]
    switch: ClassVar[str] = ""
    """The flag that enables the correction, for messages."""
    asked_by: ClassVar[str] = ""
    """Name of the setting behind `switch`. Corrections with the same setting are alternatives."""
    place: ClassVar[int] = 0
    """Position among corrections enabled by flags, lowest first. --off-policy-corrections defines its own order."""
    needs_rollout_log_probs: ClassVar[bool] = True
    """Whether trained tokens need engine log-probs."""

    @classmethod
    def asked_for(cls, settings: Any) -> bool:
        """Returns whether the correction's flag is on. Called only if --off-policy-corrections is not set."""
        return False

    @abstractmethod
    def apply(self, loss: Tensor, tokens: OffPolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns (corrected policy loss [R], metric name -> values [R]).

        Metrics are averaged over trained tokens, except those named `*_clamped`, which are counts.
        """

    def check(self, args: Args) -> str | None:
        """Returns an error message if the settings conflict, else None. Called before the run starts."""
        return None


class MismatchCorrection(Correction):
    """A correction based on w = p(trainer, before the update) / p(engine)."""

    def check(self, args: Args) -> str | None:
        if not args.use_rollout_logprobs:
            return None
        return (
            "--use-rollout-logprobs conflicts with --use-tis, --rejection-level and --get-mismatch-metrics, which "
            "compare the engine's log-probs with the trainer's; set only one of them"
        )


CORRECTIONS: Registry[Correction] = Registry(
    "off-policy correction",
    flag="--off-policy-corrections",
    package="slime.algorithms.off_policy",
    contract=Correction,
)
