"""Packed rows on the device, and their split over context-parallel ranks.

Context parallelism is visible only to `PolicyModel` and the attention layers: every rank receives the full row and the
results of all response tokens, so all ranks compute the same losses and metrics. Softmax attention gathers keys and
values. Recurrent layers need full sequences, but their heads are independent. As DeepSpeed Ulysses does for attention
(arXiv:2309.14509), they use an all-to-all before the recurrence to switch from a split by tokens to a split by heads,
and another one afterwards to switch back. So does softmax attention with `--cp-comm-type a2a`.

Invariants
1. Every rank computes the same loss and so has the gradients of all results. It uses only the gradients of its own
   tokens, so nothing is summed twice.
2. All ranks run the same collectives in the same order, even ranks without response tokens.
3. A per-head parameter gets the gradient of all tokens on the rank that computes its heads, and zero on the others. As
   for other parameters, the gradient is the sum over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from slime.data.context_split import split_context
from slime.models.common.packed_attention import PackedSequences
from slime.ops.repeats import Repeats, repeat_rows

ASKED = "asked_positions"
"""Key in a micro-batch's tensors. Its value holds the row positions whose hidden states predict response tokens."""
_INDICES = ("positions", "local_index", "order", "place")
"""Fields of `slime.data.context_split.ContextSplit` that are copied to the device."""


@dataclass(frozen=True, slots=True)
class ContextShard:
    """This rank's shard of a row of T tokens and N sequences; see `slime.data.context_split`."""

    group: dist.ProcessGroup
    positions: Tensor
    """[T / cp] int64: row positions of this rank's tokens."""
    local_index: Tensor
    """[T] int64: index among this rank's tokens, or -1 for tokens of other ranks."""
    keys: Repeats
    """[K] rows of the gathered keys, chunk by chunk."""
    order: Tensor
    """[T] int64: row positions of all ranks' tokens, in rank order."""
    place: Tensor
    """[T] int64: the inverse of `order`."""
    cu_lengths: Tensor
    """[N + 1] int32: the start of each full sequence, then the total length."""
    lengths: tuple[int, ...]
    cu_keys: Tensor
    """[N + 1] int32: the start of each full sequence's keys, including its shared prefix, then the total number."""
    key_lengths: tuple[int, ...]
    responses: tuple[Tensor, Tensor, Tensor] | None = None
    """The response positions [R] of the row and the result of `owned` for them. This is computed on the host, because
    `owned` would wait for the device."""

    def of_keys(self, rows: Tensor) -> Tensor:
        """rows [T / cp, ...] of this rank's tokens -> [K, ...] of the keys that the local chunks attend to, chunk by
        chunk.

        In the backward pass, the rank that holds a key sums its gradients from the queries of all ranks.
        """
        return repeat_rows(self._gathered(rows), self.keys)

    def keys_and_values(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """key [T / cp, g, d_k], value [T / cp, g, d_v] of this rank's tokens -> both of all ranks' tokens [T, g, d]."""
        both = self._gathered(torch.cat([key, value], dim=-1))
        keys, values = both.split([key.size(-1), value.size(-1)], dim=-1)
        return keys, values

    def _gathered(self, rows: Tensor) -> Tensor:
        gathered: Tensor = gather_from_sequence_parallel_region(rows.contiguous(), group=self.group)
        return gathered

    def by_heads(self, part: Tensor) -> Tensor:
        """All-to-all from a split by tokens to a split by heads: `part` [T / cp, h, d] -> [T, h / cp, d] in row order.

        h must be divisible by the group size.
        """
        share: Tensor = _Exchange.apply(part, self, True)
        return share

    def by_tokens(self, share: Tensor) -> Tensor:
        """All-to-all from a split by heads to a split by tokens: `share` [T, h / cp, d] -> [T / cp, h, d]."""
        part: Tensor = _Exchange.apply(share, self, False)
        return part

    def own_heads(self, parameter: Tensor) -> Tensor:
        """Returns this rank's heads [n / cp, ...] of `parameter` [n, ...], whose first dimension covers all heads."""
        return parameter.chunk(self.group.size())[self.group.rank()]

    def owned(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns which of the row `positions` [R] this rank holds [R_own], and their local token indices [R_own]."""
        if self.responses is not None and positions is self.responses[0]:
            return self.responses[1:]
        local = self.local_index.index_select(0, positions)
        which = (local >= 0).nonzero().squeeze(1)
        return which, local.index_select(0, which)

    def whole(self, part: Tensor, which: Tensor, size: int) -> Tensor:
        """Combines the results of all ranks into [R, ...], R = `size`; `part` goes to indices `which` [R_own].

        The gradient passes through unchanged, because every rank computes the same loss.
        """
        row = part.new_zeros(size, *part.shape[1:]).index_copy(0, which, part)
        result: Tensor = reduce_from_tensor_model_parallel_region(row, group=self.group)
        return result


class _Exchange(torch.autograd.Function):
    """Converts between a split by tokens and a split by heads. The backward pass does the reverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: ContextShard, to_heads: bool) -> Tensor:
        ctx.shard, ctx.to_heads = shard, to_heads
        return _exchanged(x, shard, to_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _exchanged(grads[0], ctx.shard, not ctx.to_heads), None, None


def _exchanged(x: Tensor, shard: ContextShard, to_heads: bool) -> Tensor:
    """Converts [T / cp, h, d] to [T, h / cp, d] with `to_heads`, else the reverse."""
    size = shard.group.size()
    if to_heads:
        sent = x.unflatten(1, (size, -1)).transpose(0, 1).contiguous()  # one block of heads for each rank
    else:
        sent = x.index_select(0, shard.order).unflatten(0, (size, -1))  # one block of tokens for each rank
    got = torch.empty_like(sent)  # [cp, T / cp, h / cp, d]
    dist.all_to_all_single(got, sent, group=shard.group)
    return got.flatten(0, 1).index_select(0, shard.place) if to_heads else got.transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """A packed row on the host: arrays to copy to the device, and data that stays on the host."""

    cu_seqlens: npt.NDArray[np.int32]
    """[N + 1], from 0 to T, for the full row, even under context parallelism."""
    max_seqlen: int
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    arrays: dict[str, npt.NDArray[Any]]
    """Arrays to copy to the device, by name."""
    group: dist.ProcessGroup | None
    """Context-parallel group; None without context parallelism."""

    @classmethod
    def of(
        cls,
        cu_seqlens: npt.NDArray[np.int32],
        *,
        max_seqlen: int,
        asked: npt.NDArray[np.int64] | None = None,
        prefixes: Sequence[npt.NDArray[np.int64]] | None = None,
        splits_heads: bool = False,
    ) -> RowPlan:
        """Builds this rank's plan. `asked`: positions [U] of the outputs. `prefixes`: see `PackedBatch.prefixes`.
        `splits_heads`: `--cp-comm-type a2a`."""
        lengths, starts = np.diff(cu_seqlens), cu_seqlens[:-1].astype(np.int64)
        before = np.zeros_like(starts) if prefixes is None else np.array([len(p) for p in prefixes], np.int64)
        positions = np.arange(int(cu_seqlens[-1])) - np.repeat(starts - before, lengths)
        query, key = tuple(lengths.tolist()), tuple((lengths + before).tolist())
        group, shard = None, dict[str, npt.NDArray[Any]]()
        if mpu.is_initialized() and mpu.get_context_parallel_world_size() > 1:
            group = mpu.get_context_parallel_group()
            shard = {"cu_lengths": cu_seqlens, "cu_keys": _cumulative(key)}
            read = None if splits_heads else prefixes
            split = split_context(cu_seqlens, cp_rank=group.rank(), cp_size=group.size(), prefixes=read)
            query, key, positions = split.query_lengths, split.key_lengths, positions[split.positions]
            shard |= {name: getattr(split, name) for name in _INDICES}
            keys = Repeats.arrays(split.key_rows, int(cu_seqlens[-1]))
            shard |= {f"keys/{name}": array for name, array in keys.items()}
            if asked is not None:
                local = split.local_index[asked]
                shard |= {"which": np.flatnonzero(local >= 0), "owned": local[local >= 0]}
        arrays = {"row/cu_query": _cumulative(query), "row/cu_key": _cumulative(key), "row/positions": positions}
        arrays |= {f"shard/{name}": array for name, array in shard.items()}
        if prefixes is not None and asked is not None:
            rows = asked if group is None else shard["owned"]
            questions = Repeats.arrays(rows, len(positions))
            arrays |= {f"asked/{name}": array for name, array in questions.items()}
        if prefixes is not None and (group is None or splits_heads):
            own = np.split(np.arange(int(cu_seqlens[-1])), starts[1:])
            seen = [part for both in zip(prefixes, own, strict=True) for part in both]
            repeats = Repeats.arrays(np.concatenate(seen), int(cu_seqlens[-1]))
            arrays |= {f"repeats/{name}": array for name, array in repeats.items()}
        return cls(cu_seqlens, max_seqlen, query, key, arrays, group)

    def packed(self, tensors: Mapping[str, Tensor]) -> PackedSequences:
        """Returns the row on the device. `tensors` must contain the device copies of `arrays`."""
        cu_seqlens, shard = torch.from_numpy(self.cu_seqlens), None
        if self.group is not None:
            indices = {name: tensors[f"shard/{name}"] for name in (*_INDICES, "cu_lengths", "cu_keys")}
            responses, lengths = None, tuple(np.diff(self.cu_seqlens).tolist())
            if "shard/which" in tensors:
                responses = tensors[ASKED], tensors["shard/which"], tensors["shard/owned"]
            keys = Repeats.of(tensors, "shard/keys/")
            key_lengths = tuple(np.diff(self.arrays["shard/cu_keys"]).tolist())
            shard = ContextShard(
                self.group, **indices, keys=keys, lengths=lengths, key_lengths=key_lengths, responses=responses
            )
        return PackedSequences(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_kv=self.max_seqlen,
            query_lengths=self.query_lengths,
            key_lengths=self.key_lengths,
            cu_query=tensors["row/cu_query"],
            cu_key=tensors["row/cu_key"],
            positions=tensors["row/positions"],
            shard=shard,
            repeats=Repeats.of(tensors, "repeats/") if "repeats/rows" in self.arrays else None,
            asked=Repeats.of(tensors, "asked/") if "asked/rows" in self.arrays else None,
        )


def _cumulative(lengths: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
