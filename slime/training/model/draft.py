"""Makes the embedding available to multi-token prediction on the last pipeline stage.

With several stages, only the first one has the embedding. Training changes it, so `lent_embedding` copies it to the
last stage in every step. If the embedding is tied, the last stage already has it.

Invariants
1. The copy exists only during a step. It is never saved or synced.
2. Multi-token prediction sends no gradient to the embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

if TYPE_CHECKING:
    from slime.training.model.policy_model import PolicyModel


@torch.no_grad()
def embedded_tokens(chunk: PolicyModel, tokens: Tensor) -> Tensor:
    """Returns the embeddings [T, H] of `tokens` [T], which must be the same on all tensor-parallel ranks."""
    weight, shard = _weight(chunk), chunk.shard
    local, held = shard.local(tokens)
    rows = weight.index_select(0, local).masked_fill_(~held.unsqueeze(1), 0)
    return shard.all_reduce(rows)


def _weight(chunk: PolicyModel) -> Tensor:
    if chunk.pre_process:
        weight: Tensor = chunk.embedding.word_embeddings.weight
    elif chunk.share_embeddings_and_output_weights:
        weight = chunk.output_weight()
    else:
        assert chunk.lent_embedding is not None, "the last stage has no copy of the embedding outside a step"
        weight = chunk.lent_embedding
    return weight.detach()


@contextmanager
def lent_embedding(chunks: Sequence[Any]) -> Iterator[None]:
    """Lends the first stage's embedding to the last stage inside the block, if needed. Collective over the pipeline.

    `chunks` are this rank's model chunks, wrapped in Megatron's DDP.
    """
    models: list[PolicyModel] = [chunk.module for chunk in chunks]
    if not models[-1].borrows_embedding:
        yield
        return
    group = mpu.get_pipeline_model_parallel_group()
    first, last = dist.get_global_rank(group, 0), dist.get_global_rank(group, group.size() - 1)
    if dist.get_rank() == first:
        dist.send(models[0].embedding.word_embeddings.weight.detach(), dst=last, group=group)
    elif dist.get_rank() == last:
        weight = models[-1].output_layer.weight
        models[-1].lent_embedding = torch.empty_like(weight, requires_grad=False)
        dist.recv(models[-1].lent_embedding, src=first, group=group)
    try:
        yield
    finally:
        models[-1].lent_embedding = None
