"""The loss of multi-token prediction beside that of the policy: `WithDraft`.

A trained token at index t of its sample is predicted once more, from the hidden state at t - 2 and the token at t - 1.
Its negative log-prob, at temperature 1, is averaged over the trained tokens of the step and scaled by
`--mtp-loss-scaling-factor`. The mask is that of the policy loss; a token at index 1 has nothing to be foreseen from,
and adds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slime.algorithms.algorithm import Algorithm
from slime.algorithms.token_losses import unmasked
from slime.settings import Args
from slime.training.model.log_probs import TokenScores
from slime.training.step.loss import LossParts, Objective, objective_of
from slime.training.step.micro_batch import MicroBatch


def trained_objective(args: Args, algorithm: Algorithm) -> Objective:
    """What the policy minimises, with multi-token prediction where that is trained."""
    policy = objective_of(args, algorithm)
    if not args.enable_mtp_training:
        return policy
    return WithDraft(policy, float(args.megatron["mtp_loss_scaling_factor"]))


@dataclass(frozen=True, slots=True)
class WithDraft:
    """An objective of the policy that trains multi-token prediction as well."""

    policy: Objective
    """Whose `evaluate` asks for `draft_log_probs`."""
    scaling_factor: float

    @property
    def compares_with_engines(self) -> bool:
        """See `Objective`."""
        return self.policy.compares_with_engines

    @property
    def num_results(self) -> int:
        """See `Evaluation`."""
        return self.policy.num_results

    def evaluate(self, chunk: Any, batch: MicroBatch, *, trains: bool) -> Any:
        """See `Evaluation`."""
        return self.policy.evaluate(chunk, batch, trains=trains)

    def results(self, output: Any) -> tuple[Tensor, ...]:
        """See `Evaluation`. A rehearsal goes backward from all of them."""
        return self.policy.results(output)

    def loss(self, batch: MicroBatch, output: TokenScores) -> LossParts:
        """See `Objective`. `loss` of the metrics stays the policy's."""
        parts = self.policy.loss(batch, output)
        assert output.draft_log_probs is not None, "the model was not asked for multi-token prediction"
        foreseen = batch.mask * (batch.position_ids.index_select(0, batch.predicting) > 0)
        token_loss = unmasked(-output.draft_log_probs, foreseen)
        loss = parts.loss + self.scaling_factor * batch.token_share * token_loss.sum()
        sums = {**parts.sums, "mtp_loss": token_loss.detach().double().sum() * batch.token_share}
        return LossParts(loss, parts.token_loss + token_loss.detach(), sums)
