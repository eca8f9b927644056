"""A trainer's rank with what tests measure: log-probs of a batch, and the gradients of its first optimizer step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from slime.core.batch import TrainBatch
from slime.training.backend import MegatronBackend
from slime.training.state import hf_weights
from slime.training.step.loss import LogProbs, trained_objective
from slime.training.step.micro_batch import PreparedBatch
from slime.training.step.optimizer import Trainable, zero_grad
from slime.training.step.train_step import forward_batch, run_step


class MeasuredBackend(MegatronBackend):
    """Nothing that is measured changes anything. Collective."""

    def log_probs(self, batch: TrainBatch) -> list[npt.NDArray[np.float32]]:
        """Log-prob of every response token [R] under the current weights, one array per sample."""
        return list(self.forward(self._prepare(batch, one_step=True))[0])

    def forward(self, prepared: PreparedBatch) -> tuple[Any, ...]:
        """The results of `LogProbs` under the current weights."""
        return forward_batch(self._context, LogProbs(self.args), self._trainable.ddps, prepared)

    def with_advantages(self, batch: TrainBatch) -> PreparedBatch:
        """The batch as it is trained: log-probs, advantages, returns."""
        return self._with_advantages(self._prepare(batch))

    def gradients(self, batch: TrainBatch) -> dict[str, Tensor]:
        """HF name (of an adapter, its global name) -> full float32 gradient of a batch's first optimizer step.

        What is frozen has none.
        """
        local = self._first_step_gradients(self.with_advantages(batch))
        trained = {name for tensor in self.model.tensors.values() if tensor.trained for name in tensor.entry.hf}
        tensors = hf_weights.iter_hf_tensors(self.model.at(local), dtype=torch.float32)
        return {name: tensor for name, tensor in tensors if name in trained}

    def _first_step_gradients(self, prepared: PreparedBatch) -> dict[str, Tensor]:
        """Global Megatron name -> gradient [shard shape] float32, summed over all ranks; zeros for what is frozen.

        A training step leaves each data-parallel rank with its own shard of the gradients only.
        """
        trainable, objective = self._trainable, trained_objective(self.args, self._algorithm)
        zero_grad(trainable)
        run_step(self._context, objective, trainable, prepared, prepared.schedule.steps[0], None)
        gather_grads(trainable)
        out = {own.name: own.here.of(_main_grad(own.here.parameter)).detach().clone() for own in self.model.own}
        zero_grad(trainable)
        return out


def _main_grad(parameter: Tensor) -> Tensor:
    return getattr(parameter, "main_grad", torch.zeros_like(parameter, dtype=torch.float32))


def gather_grads(trainable: Trainable) -> None:
    """After gradients are reduced: gives every data-parallel rank all shards. Collective."""
    for ddp in trainable.ddps:
        dense, experts = (ddp.buffers, ddp.intra_dp_cp_group), (ddp.expert_parallel_buffers, ddp.intra_expt_dp_group)
        for buffers, group in (dense, experts):
            for bucket in (bucket for buffer in buffers for bucket in buffer.buckets):
                own = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, own, group=group)
