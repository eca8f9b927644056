"""The set of tokens that top-k and top-p leave to the sampler, found without sorting or gathering the vocabulary.

The rule is that of SGLang's samplers ("joint" order): with tokens in descending order of probability, token i is kept
if i < top_k and the mass of the tokens before it, under the whole distribution, is <= top_p. So the first token whose
cumulated mass passes top_p is kept, and top-k does not renormalise what top-p sees.

The mass above a value falls as the value grows, so the least kept logit of a row is found by bisection over the bit
patterns of the logits' own dtype: 16 rounds in half precision, 32 in float32, each one reduction of [n] numbers over
the tensor-parallel group. Logits computed in half precision tie often; of the ties at the edge the lowest ids are
kept, as a stable sort would (the engine's sort leaves their order open).

Invariants
1. Every rank of the group finds the same set: decisions are made on reduced numbers only.
2. The most probable token is always kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from slime.training.model.vocab_shard import VocabShard

_INTEGERS = {
    torch.bfloat16: (torch.int16, 16),
    torch.float16: (torch.int16, 16),
    torch.float32: (torch.int32, 32),
    torch.float64: (torch.int64, 64),
}


@dataclass(frozen=True, slots=True)
class TopPSet:
    """The kept set of `n` rows, as two numbers per row."""

    edge: Tensor
    """[n] dtype of the logits: the least kept logit; larger ones are all kept."""
    last_tie: Tensor
    """[n] int64: last local column kept among those equal to `edge`; -1: none on this rank."""

    def kept(self, raw: Tensor, rows: slice) -> Tensor:
        """bool [rows, V_local] for the same rows of logits `raw`."""
        edge = self.edge[rows].unsqueeze(1)
        columns = torch.arange(raw.size(1), device=raw.device)
        return (raw > edge) | ((raw == edge) & (columns <= self.last_tie[rows].unsqueeze(1)))


def find_top_p_set(
    raw: Tensor,
    exp: Tensor,
    total: Tensor,
    shard: VocabShard,
    *,
    top_p: float,
    top_k: int,
    slices: Sequence[slice],
) -> TopPSet:
    """The kept set of each row. raw [n, V_local] logits; exp [n, V_local] their unnormalised probabilities; total [n]
    the global sum of them. `top_p` >= 1 and `top_k` < 1 keep all. `slices` of the n rows bound temporaries. Collective.
    """
    limit = total * top_p if top_p < 1.0 else torch.full_like(total, float("inf"))
    most = top_k if top_k > 0 else 1 << 30

    def above(value: Tensor) -> tuple[Tensor, Tensor]:
        """Mass and number of tokens with logits greater than `value` [n], over all ranks."""
        sums = total.new_zeros(2, raw.size(0))
        for rows in slices:
            mask = raw[rows] > value[rows].unsqueeze(1)
            sums[0, rows] = torch.where(mask, exp[rows], 0.0).sum(dim=1)
            if top_k > 0:
                sums[1, rows] = mask.sum(dim=1).to(sums.dtype)
        mass, count = shard.all_reduce(sums)
        return mass, count

    low, high = _bounds(raw, total.dtype, shard)
    for _ in range(_INTEGERS[raw.dtype][1]):
        middle = (low & high) + ((low ^ high) >> 1)  # the floor of the mean, without overflow
        mass, count = above(_value(middle, raw.dtype))
        enough = (mass <= limit) & (count < most)
        high = torch.where(enough, middle, high)
        low = torch.where(enough, low, middle + 1)
    edge = _value(high, raw.dtype)
    if raw.size(1):  # the least logit that exists, up to here only a bound for it
        floors = [torch.where(raw[r] >= edge[r].unsqueeze(1), raw[r], float("inf")).amin(dim=1) for r in slices]
        edge = torch.cat(floors)
    edge = shard.all_reduce(edge.to(total.dtype), dist.ReduceOp.MIN).to(raw.dtype)
    mass, count = above(edge)
    return TopPSet(edge, _last_ties(raw, exp, edge, (limit - mass, most - count), shard, slices))


def _last_ties(
    raw: Tensor, exp: Tensor, edge: Tensor, room: tuple[Tensor, Tensor], shard: VocabShard, slices: Sequence[slice]
) -> Tensor:
    """int64 [n]: the last local column kept of those equal to `edge`. room: mass and number that are left [n]."""
    ties, each = torch.zeros_like(room[0]), torch.zeros_like(room[0])
    for rows in slices if raw.size(1) else ():
        tie = raw[rows] == edge[rows].unsqueeze(1)
        ties[rows] = tie.sum(dim=1).to(ties.dtype)
        each[rows] = torch.where(tie, exp[rows], 0.0).amax(dim=1)
    shard.all_reduce(each, dist.ReduceOp.MAX)
    # The j-th tie, counted from 0, is kept if mass + j * each <= limit. Where `each` underflowed to 0 all of them fit.
    by_mass = torch.where(each > 0, torch.floor(room[0] / each) + 1, float("inf"))
    allowed = torch.minimum(by_mass, room[1]) - shard.sum_of_lower_ranks(ties)
    last = torch.full(edge.shape, -1, dtype=torch.int64, device=edge.device)
    columns = torch.arange(raw.size(1), device=raw.device)
    for rows in slices if raw.size(1) else ():
        tie = raw[rows] == edge[rows].unsqueeze(1)
        kept = tie & (tie.cumsum(dim=1, dtype=torch.int32) <= allowed[rows].unsqueeze(1))
        last[rows] = torch.where(kept, columns, -1).amax(dim=1)
    return last


def _bounds(raw: Tensor, wide: torch.dtype, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Keys [n] of the least and the greatest logit of each row over all ranks."""
    if raw.size(1):
        ends = torch.stack([-raw.amin(dim=1), raw.amax(dim=1)]).to(wide)
    else:
        ends = torch.full((2, raw.size(0)), -float("inf"), dtype=wide, device=raw.device)
    low, high = shard.all_reduce(ends, dist.ReduceOp.MAX)
    return _key(-low, raw.dtype), _key(high, raw.dtype)


def _key(value: Tensor, dtype: torch.dtype) -> Tensor:
    """int64 keys in the order of the values, which `dtype` holds exactly: the bit pattern, with negatives reversed."""
    integer, bits = _INTEGERS[dtype]
    pattern = value.to(dtype).view(integer).to(torch.int64)
    return torch.where(pattern < 0, pattern ^ ((1 << (bits - 1)) - 1), pattern)


def _value(key: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `_key`."""
    integer, bits = _INTEGERS[dtype]
    pattern = torch.where(key < 0, key ^ ((1 << (bits - 1)) - 1), key)
    return pattern.to(integer).view(dtype)
