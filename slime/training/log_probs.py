"""Log-probs and entropy of chosen tokens from hidden states, without a full-vocabulary matrix for the whole batch.

The logits of `chunk_tokens` rows exist at a time, in the forward pass and again in the backward pass (recomputed from
the hidden states and the saved normaliser). The vocabulary may be split over the tensor-parallel group.

Invariants
1. Rows of the output weight beyond the real vocabulary never enter the softmax.
2. The result does not depend on `chunk_tokens`, and on the number of vocabulary shards only by float32 rounding.
3. The gradient with respect to `hidden` is this rank's part; the caller sums it over the tensor-parallel group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

DEFAULT_CHUNK_TOKENS = 1024
"""Rows of logits at a time: 1024 x 152k x 4 bytes = 0.6 GB."""


@dataclass(frozen=True, slots=True)
class VocabShard:
    """Which rows of the vocabulary this rank holds."""

    start: int
    """Global id of the first local row."""
    num_valid: int
    """Local rows that are real tokens; those after them are padding."""
    group: dist.ProcessGroup | None
    """Tensor-parallel group; None when the vocabulary is whole."""


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_grad: bool = False,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
) -> tuple[Tensor, Tensor | None]:
    """Natural log-probs of `targets` under softmax(hidden @ weight.T / temperature).

    hidden [T, H]; weight [V_local, H]; targets [T] int64, global ids. Returns float32 [T], and the entropy [T] or None;
    the log-probs can be differentiated, the entropy if `entropy_grad`. The matrix product runs in the dtype of the
    model, the softmax in float32.
    """
    settings = _Settings(
        shard, float(temperature), with_entropy, entropy_grad, chunk_tokens if chunk_tokens > 0 else 1 << 30
    )
    log_probs, entropy = _TokenLogProbs.apply(hidden, weight, targets, settings)
    return log_probs, (entropy if with_entropy else None)


@dataclass(frozen=True, slots=True)
class _Settings:
    shard: VocabShard
    temperature: float
    with_entropy: bool
    entropy_grad: bool
    chunk_tokens: int


def _scaled_logits(hidden: Tensor, weight: Tensor, shard: VocabShard, temperature: float) -> Tensor:
    logits = torch.matmul(hidden, weight.t()).float()
    if temperature != 1.0:
        logits = logits / temperature
    if shard.num_valid < logits.size(1):
        logits[:, shard.num_valid :] = float("-inf")
    return logits


def _finite(logits: Tensor, shard: VocabShard) -> Tensor:
    """Zero instead of -inf in padded columns, whose probability is zero: 0 * -inf would be NaN."""
    if shard.num_valid == logits.size(1):
        return logits
    return torch.cat([logits[:, : shard.num_valid], torch.zeros_like(logits[:, shard.num_valid :])], dim=1)


def _all_reduce(x: Tensor, shard: VocabShard, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    if shard.group is not None and shard.group.size() > 1:
        dist.all_reduce(x, op=op, group=shard.group)
    return x


def _local_targets(targets: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Local row of each target (0 where another rank holds it) and whether it is local."""
    local = targets - shard.start
    held = (local >= 0) & (local < shard.num_valid)
    return torch.where(held, local, torch.zeros_like(local)), held


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        settings: _Settings,
    ) -> tuple[Tensor, Tensor]:
        shard, temperature, chunk_tokens = settings.shard, settings.temperature, settings.chunk_tokens
        num_tokens = hidden.size(0)
        out, lse, entropy = (torch.zeros(num_tokens, dtype=torch.float32, device=hidden.device) for _ in range(3))
        for start in range(0, num_tokens, chunk_tokens):
            part = slice(start, min(start + chunk_tokens, num_tokens))
            logits = _scaled_logits(hidden[part], weight, shard, temperature)
            local, held = _local_targets(targets[part], shard)
            picked = logits.gather(1, local.unsqueeze(1)).squeeze(1)
            picked = _all_reduce(torch.where(held, picked, torch.zeros_like(picked)), shard)
            top = _all_reduce(logits.max(dim=1).values, shard, dist.ReduceOp.MAX)
            exp = torch.exp(logits - top.unsqueeze(1))
            total = _all_reduce(exp.sum(dim=1), shard)
            lse[part] = top + total.log()
            out[part] = picked - lse[part]
            if settings.with_entropy:  # H = lse - E[logit]
                mean = _all_reduce((exp * _finite(logits, shard)).sum(dim=1), shard) / total
                entropy[part] = lse[part] - mean
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.settings = settings
        if not settings.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return out, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_log_prob, grad_entropy = grads
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        settings: _Settings = ctx.settings
        shard, temperature, chunk_tokens = settings.shard, settings.temperature, settings.chunk_tokens
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for start in range(0, hidden.size(0), chunk_tokens):
            part = slice(start, min(start + chunk_tokens, hidden.size(0)))
            logits = _scaled_logits(hidden[part], weight, shard, temperature)
            log_p = logits - lse[part].unsqueeze(1)
            p = torch.exp(log_p)
            grad = -p * grad_log_prob[part].unsqueeze(1)
            local, held = _local_targets(targets[part], shard)
            own = torch.where(held, grad_log_prob[part], torch.zeros_like(grad_log_prob[part]))
            grad.scatter_add_(1, local.unsqueeze(1), own.unsqueeze(1))
            if settings.entropy_grad:  # dH/dlogit = -p (log p + H)
                grad -= p * (_finite(log_p, shard) + entropy[part].unsqueeze(1)) * grad_entropy[part].unsqueeze(1)
            grad = (grad / temperature).to(weight.dtype)
            grad_hidden[part] = torch.matmul(grad, weight)
            grad_weight += torch.matmul(grad.t(), hidden[part])
        return grad_hidden, grad_weight.to(weight.dtype), None, None
