"""Packed rows on the device, and context parallelism: a rank's shard of a row, keys of the whole row, whole results.

Only `PolicyModel` and the attention know of it: every rank is given the whole row, and every rank gets the results of
all response tokens, so that losses and metrics are computed alike on all of them.

Invariants
1. A gradient that flows into a whole result is the gradient of the one loss that every rank computes: each rank takes
   the part of what it owns, and nothing is summed twice.
2. All ranks run the same collectives in the same order, also one that owns no response token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from slime.data.context_split import split_context
from slime.models.common.attention import PackedSequences


@dataclass(frozen=True, slots=True)
class ContextShard:
    """This rank's part of a row of T tokens and N sequences; see `slime.data.context_split`."""

    group: dist.ProcessGroup
    """The context-parallel group."""
    positions: Tensor
    """[T / cp] int64 row positions of the tokens held here."""
    local_index: Tensor
    """[T] int64, -1 for tokens held elsewhere."""
    key_rows: Tensor
    """[K] int64 rows of the gathered keys, chunk by chunk."""
    query_lengths: tuple[int, ...]
    """[2 N]"""
    key_lengths: tuple[int, ...]
    """[2 N]"""

    @classmethod
    def build(cls, cu_seqlens: Tensor, device: torch.device) -> ContextShard | None:
        """None without context parallelism. `cu_seqlens`: [N + 1] int32 on the host."""
        if not mpu.is_initialized() or mpu.get_context_parallel_world_size() == 1:
            return None
        group = mpu.get_context_parallel_group()
        split = split_context(cu_seqlens.numpy(), cp_rank=group.rank(), cp_size=group.size())
        positions, local_index, key_rows = (
            torch.from_numpy(x).to(device, non_blocking=True)
            for x in (split.positions, split.local_index, split.key_rows)
        )
        return cls(group, positions, local_index, key_rows, split.query_lengths, split.key_lengths)

    def keys_and_values(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """key [T / cp, g, d_k], value [T / cp, g, d_v] -> those of each local chunk end to end, [K, g, d].

        The backward pass sums what all ranks' queries add to a key, and gives it to the rank that holds the key.
        """
        both = torch.cat([key, value], dim=-1)
        gathered = gather_from_sequence_parallel_region(both.contiguous(), group=self.group)
        seen = gathered.index_select(0, self.key_rows)
        keys, values = seen.split([key.size(-1), value.size(-1)], dim=-1)
        return keys, values

    def owned(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of row positions [R]: which are held here [R_own], and their index among this rank's tokens [R_own]."""
        local = self.local_index.index_select(0, positions)
        which = (local >= 0).nonzero().squeeze(1)
        return which, local.index_select(0, which)

    def whole(self, part: Tensor, which: Tensor, size: int) -> Tensor:
        """Results of this rank [R_own, ...] at `which` [R_own] -> those of all ranks [R, ...], R = `size`."""
        row = part.new_zeros(size, *part.shape[1:]).index_copy(0, which, part)
        result: Tensor = _SumForward.apply(row, self.group)
        return result


class _SumForward(torch.autograd.Function):
    """Sum over the group; the gradient passes unchanged, for every rank computes the same whole loss."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def packed_sequences(cu_seqlens: Tensor, *, max_seqlen: int, device: torch.device) -> PackedSequences:
    """`cu_seqlens`: [N + 1] int32 on the host, from 0 to T, of the whole row (also under context parallelism)."""
    shard = ContextShard.build(cu_seqlens, device)
    lengths = tuple(cu_seqlens.diff().tolist())
    query, key = (shard.query_lengths, shard.key_lengths) if shard else (lengths, lengths)
    first, counts = torch.stack([cu_seqlens[:-1].long(), cu_seqlens.diff().long()]).to(device, non_blocking=True)
    num_tokens = int(cu_seqlens[-1])
    positions = torch.arange(num_tokens, device=device) - first.repeat_interleave(counts, output_size=num_tokens)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
        query_lengths=query,
        key_lengths=key,
        cu_query=_cumulative(query, device),
        cu_key=_cumulative(key, device),
        positions=positions if shard is None else positions.index_select(0, shard.positions),
        shard=shard,
    )


def _cumulative(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device, non_blocking=True)
