"""What ranks do in the context-parallel test with one packed row over several gloo processes: attention and log-probs,
and the exchange of tokens for heads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state as mpu

from slime.compat.megatron_cpu import activate
from tests.support.ranks import Seat

LENGTHS, NUM_HEADS, NUM_GROUPS, HEAD_DIM, VALUE_DIM, VOCAB = (16, 8, 24), 4, 2, 8, 6, 11
HEADS = torch.linspace(0.5, 2.0, NUM_HEADS)
"""A weight of each head."""
FORKS = (np.zeros(0, np.int64), np.arange(10), np.concatenate([np.arange(10), np.arange(16, 20)]))
"""Row positions of the prefix of each sequence, if the row is a tree: the second sequence forks off the first, and the
third off the second."""
PREDICTING = ((0, 1, 2, 9, 14, 16, 17, 25, 30, 46), (0,))
"""Predicting positions of the row; of the second set one rank holds all."""


def problem() -> dict[str, torch.Tensor]:
    """Random query, key, value, output weight, targets and loss weights of one row of 48 tokens."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(LENGTHS)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "query": draw(num_tokens, NUM_HEADS, HEAD_DIM),
        "key": draw(num_tokens, NUM_GROUPS, HEAD_DIM),
        "value": draw(num_tokens, NUM_GROUPS, VALUE_DIM),
        "weight": draw(VOCAB, NUM_HEADS * VALUE_DIM),
        "targets": torch.randint(0, VOCAB, (len(PREDICTING[0]),), generator=generator),
        "loss_weights": draw(len(PREDICTING[0])),
    }


def packed_sequences(cu_seqlens: torch.Tensor, **how: Any) -> Any:
    from slime.training.model.row_shards import RowPlan

    plan = RowPlan.of(cu_seqlens.numpy(), max_seqlen=max(LENGTHS), **how)
    return plan.packed({name: torch.from_numpy(array) for name, array in plan.arrays.items()})


def plain_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, forked: bool) -> torch.Tensor:
    """Of the whole row, by one softmax over all its keys and a mask that says which of them each query sees."""
    seen, start = torch.zeros(len(query), len(query), dtype=torch.bool), 0
    for prefix, length in zip(FORKS, LENGTHS, strict=True):
        for token in range(start, start + length):
            seen[token, start : token + 1] = True
            seen[token, torch.from_numpy(prefix)] |= forked
        start += length
    key, value = (x.repeat_interleave(NUM_HEADS // NUM_GROUPS, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / HEAD_DIM**0.5
    weights = scores.masked_fill(~seen, -float("inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


def compute(
    positions: tuple[int, ...], *, splits_heads: bool = False, forked: bool = False, plain: bool = False
) -> dict[str, torch.Tensor]:
    """This rank's attention output, the log-probs at `positions` and the gradients; the whole row without groups.

    `forked`: the sequences are branches (`FORKS`). `plain`: by `plain_attention`.
    """
    from slime.models.common.packed_attention import PackedAttention
    from slime.training.model.log_probs import VocabShard, token_log_probs
    from slime.training.model.row_shards import ASKED, RowPlan

    cu_seqlens = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)
    tree: dict[str, Any] = {"prefixes": FORKS, "splits_heads": splits_heads} if forked else {}
    packed = packed_sequences(cu_seqlens, **tree)
    cut = packed.shard
    held = torch.arange(sum(LENGTHS)) if cut is None else cut.positions
    p = problem()
    leaves = {name: p[name].index_select(0, held) for name in ("query", "key", "value")} | {"weight": p["weight"]}
    for leaf in leaves.values():
        leaf.requires_grad_()
    attention = PackedAttention.__new__(PackedAttention)
    torch.nn.Module.__init__(attention)
    attention.softmax_scale, attention.splits_heads = None, splits_heads
    of_row = leaves["query"], leaves["key"], leaves["value"]
    out = plain_attention(*of_row, forked) if plain else attention(*of_row, packed_seq_params=packed)
    wanted, targets = torch.tensor(positions), p["targets"][: len(positions)]
    which, own = (torch.arange(len(positions)), wanted) if cut is None else cut.owned(wanted)
    if cut is not None:
        plan = RowPlan.of(cu_seqlens.numpy(), max_seqlen=max(LENGTHS), asked=np.array(positions))
        tensors = {name: torch.from_numpy(array) for name, array in plan.arrays.items()} | {ASKED: wanted}
        counted = plan.packed(tensors).shard
        assert counted is not None and counted.owned(wanted)[0] is tensors["shard/which"]
        assert all(map(torch.equal, counted.owned(wanted), (which, own))), "counted on the host, the same"
    part, _ = token_log_probs(out[own], leaves["weight"], targets[which], VocabShard(0, VOCAB, None))
    log_probs = part if cut is None else cut.whole(part, which, len(wanted))
    (log_probs.exp() * p["loss_weights"][: len(positions)]).sum().backward()
    gradients = {f"grad_{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {"positions": held, "out": out.detach(), "log_probs": log_probs.detach(), **gradients}


def exchange(seat: Seat) -> dict[str, torch.Tensor]:
    """Tokens given for heads, these multiplied by their weights, and given back; with gradients."""
    activate("cpu")
    with seat.world():
        mpu.initialize_model_parallel(context_parallel_size=seat.world_size)
        try:
            cu_seqlens = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)
            cut = packed_sequences(cu_seqlens).shard
            assert cut is not None and cut.lengths == LENGTHS and torch.equal(cut.cu_lengths, cu_seqlens)
            p = problem()
            part, of_heads = p["query"].index_select(0, cut.positions).requires_grad_(), HEADS.clone().requires_grad_()
            share = cut.by_heads(part)
            out = cut.by_tokens(share.cumsum(0) * cut.own_heads(of_heads)[:, None])
            (out * out.detach().sin()).sum().backward()
            assert part.grad is not None and of_heads.grad is not None
            return {
                "positions": cut.positions,
                "share": share.detach(),
                "out": out.detach(),
                "grad_part": part.grad,
                "grad_heads": of_heads.grad,
            }
        finally:
            mpu.destroy_model_parallel()


def compute_part(seat: Seat) -> dict[tuple[bool, bool], list[dict[str, torch.Tensor]]]:
    """(splits_heads, forked) -> what this rank finds, for each of `PREDICTING`. Heads are split if they can be."""
    activate("cpu")
    with seat.world():
        mpu.initialize_model_parallel(context_parallel_size=seat.world_size)
        try:
            return {
                (splits_heads, forked): [
                    compute(positions, splits_heads=splits_heads, forked=forked) for positions in PREDICTING
                ]
                for splits_heads in ((False, True) if NUM_GROUPS % seat.world_size == 0 else (False,))
                for forked in (False, True)
            }
        finally:
            mpu.destroy_model_parallel()
