"""Logits of a whole packed row, for losses that are written over them (`--custom-loss-logits`).

Everything else asks for log-probs, chunk by chunk (`log_probs`). Here [T, V] logits exist at once, in the dtype of the
model, and their gradient with them; on every tensor-parallel rank, since the vocabulary's shards are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor

from slime.training.model.vocab_shard import VocabShard


@dataclass(frozen=True, slots=True)
class RowLogits:
    """What the model says of every position of a row."""

    logits: Tensor
    """[T, V] in the dtype of the model, before temperature; prompts and padding of the row included."""
    log_probs: Tensor
    """[U] float32 of the tokens that were asked for, without temperature and without a gradient."""


def row_logits(
    hidden: Tensor,
    weight: Tensor,
    shard: VocabShard,
    vocab_size: int,
    positions: Tensor,
    target_tokens: Tensor,
    *,
    chunk_tokens: int,
) -> RowLogits:
    """hidden [T, H], the same on all tensor-parallel ranks; weight [V_local, H]; `target_tokens` [U] are predicted at
    `positions` [U]. Collective over these ranks.

    Every rank makes the same loss of the result, so each one's gradient is its own shard's; the caller sums that of
    `hidden`. Rows of the weight beyond the vocabulary never enter a product.
    """
    logits = F.linear(hidden, weight[: shard.num_valid])
    if shard.group is not None:
        padded = F.pad(logits, (0, weight.size(0) - shard.num_valid))
        logits = gather_from_tensor_model_parallel_region(padded)[:, :vocab_size]
    step = chunk_tokens if chunk_tokens > 0 else max(positions.numel(), 1)
    with torch.no_grad():
        parts = [
            F.cross_entropy(logits.index_select(0, at).float(), token, reduction="none").neg()
            for at, token in zip(positions.split(step), target_tokens.split(step), strict=True)
        ]
    return RowLogits(logits, torch.cat(parts))
