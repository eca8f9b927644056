"""What a model answers for a micro-batch and what is minimised: the policy's log-probs, or the critic's values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from slime.training.loss import LossParts, micro_batch_loss, micro_batch_value_loss
from slime.training.micro_batch import MicroBatch


class Task(Protocol):
    """One model's side of a training step."""

    @property
    def meets_engines(self) -> bool:
        """Whether what it answers can be compared with what engines reported."""

    def evaluate(self, chunk: Any, batch: MicroBatch, *, trains: bool) -> Any:
        """The output of one model chunk; `trains`: a loss will be made of it."""

    def scores(self, output: Any) -> Tensor:
        """The last chunk's signal [R] float32."""

    def loss(self, batch: MicroBatch, output: Any) -> LossParts:
        """Of the last chunk's output."""


@dataclass(frozen=True, slots=True)
class PolicyTask:
    """Log-probs at the temperature of sampling (fine-tuning: at 1), and entropy where a loss needs it."""

    args: Any

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
        )

    def scores(self, output: Any) -> Tensor:
        log_probs: Tensor = output[0]
        return log_probs

    def loss(self, batch: MicroBatch, output: Any) -> LossParts:
        log_probs, entropy = output
        return micro_batch_loss(self.args, batch, log_probs, entropy)


@dataclass(frozen=True, slots=True)
class ValueTask:
    """The expected return before each response token."""

    args: Any

    @property
    def meets_engines(self) -> bool:
        return False

    def evaluate(self, chunk: Any, batch: MicroBatch, *, trains: bool) -> Any:
        return chunk(batch.tokens, batch.position_ids, batch.packed, batch.predicting)

    def scores(self, output: Any) -> Tensor:
        values: Tensor = output
        return values

    def loss(self, batch: MicroBatch, output: Any) -> LossParts:
        return micro_batch_value_loss(self.args, batch, output)
