"""One pass of micro-batches through the model, by Megatron's own schedules: plain, 1F1B or interleaved.

Every rank of a pipeline builds the same micro-batches in the same order; a stage waits for the hidden states of the
one before it. Only the last chunk has results, and only there `finish` is called.

Invariants
1. The loss is not scaled by the number of micro-batches, tokens or ranks: it carries its denominators already.
2. All ranks run the same number of micro-batches, so that sends and collectives match.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from slime.training.step.micro_batch import MicroBatch

Finish = Callable[[MicroBatch, Any], Tensor]
"""From a micro-batch and the last chunk's output to the scalar loss; called once for each, in order."""


def run_micro_batches(
    chunks: Sequence[Any],
    batches: Iterator[MicroBatch],
    num_micro_batches: int,
    *,
    evaluate: Callable[[Any, MicroBatch], Any],
    finish: Finish,
    forward_only: bool = False,
) -> None:
    """Forward passes, and backward passes unless `forward_only`, of `num_micro_batches` micro-batches. Collective.

    `chunks`: this rank's model chunks in Megatron's data-parallel wrapper. `evaluate(chunk, micro_batch)`: the output
    of one chunk. Gradients are summed into the wrapper's buffers; a later `reduce_grads` sums them over ranks.
    """

    def forward_step(iterator: Iterator[MicroBatch], chunk: Any) -> tuple[Any, Callable[[Any], Any]]:
        batch = next(iterator)

        def loss_of(output: Any) -> tuple[Tensor, Tensor, None]:
            # Of the three ways to return a loss, this one is not divided under `calculate_per_token_loss`.
            return finish(batch, output), torch.zeros((), dtype=torch.int), None

        return evaluate(chunk, batch), loss_of

    with torch.set_grad_enabled(not forward_only):
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=list(itertools.tee(batches, len(chunks))),
            model=list(chunks),
            num_microbatches=num_micro_batches,
            seq_length=1,  # shapes are exchanged: rows differ in length
            micro_batch_size=1,
            forward_only=forward_only,
        )


def micro_batch_multiple(chunks: Sequence[Any]) -> int:
    """Every rank's number of micro-batches must be a multiple of this: interleaving works in rounds."""
    if len(chunks) == 1:
        return 1
    return int(chunks[0].config.microbatch_group_size_per_vp_stage)
