"""What a model answers for a micro-batch and what is minimised: the policy's log-probs, or the critic's values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from slime.training.step.loss import LossParts, is_cut, micro_batch_loss, micro_batch_value_loss
from slime.training.step.micro_batch import MicroBatch


class Task(Protocol):
    """One model's side of a training step."""

    @property
    def meets_engines(self) -> bool:
        """Whether what it answers can be compared with what engines reported."""

    def evaluate(self, chunk: Any, batch: MicroBatch, *, trains: bool) -> Any:
        """The output of one model chunk; `trains`: a loss will be made of it."""

    def scores(self, output: Any) -> tuple[Tensor, ...]:
        """The last chunk's signals, each [R] float32; the last of them is what engines report, if anything is."""

    @property
    def num_signals(self) -> int:
        """How many `scores` gives."""

    def loss(self, batch: MicroBatch, output: Any) -> LossParts:
        """Of the last chunk's output."""


@dataclass(frozen=True, slots=True)
class PolicyTask:
    """Log-probs under the distribution that was sampled from, temperature, top-k and top-p (fine-tuning: the plain
    one), and entropy where a loss needs it.

    Engines report log-probs of the whole distribution at that temperature, whatever top-k and top-p cut off; so
    with a cut there is a second signal, of the whole distribution.
    """

    args: Any
    whole: bool = False
    """Only the whole distribution: all that is asked of a reference or a teacher."""

    @property
    def meets_engines(self) -> bool:
        return bool(self.args.loss_type == "policy_loss")

    def evaluate(self, chunk: Any, batch: MicroBatch, *, trains: bool) -> Any:
        args, samples = self.args, self.args.loss_type != "sft_loss"
        with_entropy = trains and args.loss_type == "policy_loss"
        return chunk(
            batch.tokens,
            batch.position_ids,
            batch.packed,
            batch.predicting,
            batch.targets,
            temperature=float(args.rollout_temperature) if samples else 1.0,
            with_entropy=with_entropy,
            entropy_grad=with_entropy and bool(args.entropy_coef),
            chunk_tokens=int(args.log_probs_chunk_size),
            top_p=float(args.rollout_top_p) if samples and not self.whole else 1.0,
            top_k=int(args.rollout_top_k) if samples and not self.whole else -1,
        )

    @property
    def num_signals(self) -> int:
        return 2 if is_cut(self.args) and not self.whole else 1

    def scores(self, output: Any) -> tuple[Tensor, ...]:
        return (output.log_probs, output.full_log_probs)[: self.num_signals]

    def loss(self, batch: MicroBatch, output: Any) -> LossParts:
        return micro_batch_loss(self.args, batch, output)


@dataclass(frozen=True, slots=True)
class ValueTask:
    """The expected return before each response token."""

    args: Any

    @property
    def meets_engines(self) -> bool:
        return False

    def evaluate(self, chunk: Any, batch: MicroBatch, *, trains: bool) -> Any:
        return chunk(batch.tokens, batch.position_ids, batch.packed, batch.predicting)

    @property
    def num_signals(self) -> int:
        return 1

    def scores(self, output: Any) -> tuple[Tensor, ...]:
        return (output,)

    def loss(self, batch: MicroBatch, output: Any) -> LossParts:
        return micro_batch_value_loss(self.args, batch, output)
