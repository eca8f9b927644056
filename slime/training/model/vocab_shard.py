"""`VocabShard`: which rows of the vocabulary a tensor-parallel rank holds, and reductions over the other ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class VocabShard:
    """Which rows of the vocabulary this rank holds."""

    start: int
    """Global id of the first local row; grows with the rank."""
    num_valid: int
    """Local rows that are real tokens; those after them are padding."""
    group: dist.ProcessGroup | None
    """Tensor-parallel group; None when the vocabulary is whole."""

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """`x` reduced in place over the group."""
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(x, op=op, group=self.group)
        return x

    def sum_of_lower_ranks(self, x: Tensor) -> Tensor:
        """What the ranks that hold smaller ids have in `x`, summed. A collective."""
        if self.group is None or self.group.size() == 1:
            return torch.zeros_like(x)
        parts = x.new_zeros((self.group.size(), *x.shape))
        parts[self.group.rank()] = x
        return self.all_reduce(parts)[: self.group.rank()].sum(dim=0).to(x.dtype)

    def local(self, target_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Local row of each global id [T] (0 where another rank holds it) and bool [T]: whether it is local."""
        local = target_tokens - self.start
        held = (local >= 0) & (local < self.num_valid)
        return torch.where(held, local, torch.zeros_like(local)), held
