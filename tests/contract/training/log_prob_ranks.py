"""Scores random tokens with the vocabulary split over gloo ranks.

Every rank holds `ceil(V / WORLD)` rows, padded with NaN; a rank may hold padding alone. The answer has for each of
`SCENARIOS`: log-probs, entropy, full log-probs, outside, and the gradients of hidden states (summed over the ranks) and
weight (valid rows of all ranks).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist

from slime.training.model.log_probs import VocabShard, score_tokens
from tests.support.ranks import Seat

TOKENS, HIDDEN, VOCAB = 29, 16, 131
SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"chunk_tokens": 5, "temperature": 0.7},
    "float64": {"dtype": "float64", "temperature": 0.7},
    "bfloat16": {"dtype": "bfloat16"},
    "top_p": {"top_p": 0.8, "chunk_tokens": 7},
    "top_k": {"top_k": 9, "temperature": 0.7},
    "both": {"top_k": 20, "top_p": 0.6, "dtype": "float64"},
    "ties": {"top_p": 0.7, "rounded": True},
    "ties_top_k": {"top_k": 30, "rounded": True, "dtype": "float64"},
    "few": {"vocab": 2, "top_p": 0.9},
}
"""`few`: with three ranks, the last holds no token."""


def score_all(seat: Seat) -> dict[str, dict[str, torch.Tensor]]:
    """Scenario -> results, on every rank."""
    with seat.world() if seat.world_size > 1 else contextlib.nullcontext() as group:
        return _score_all(seat.rank, seat.world_size, group)


def _score_all(rank: int, world: int, group: Any) -> dict[str, dict[str, torch.Tensor]]:
    results = {}
    for name, scenario in SCENARIOS.items():
        options = dict(scenario)
        dtype, vocab = getattr(torch, options.pop("dtype", "float32")), options.pop("vocab", VOCAB)
        generator = torch.Generator().manual_seed(5)
        hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
        weight = torch.randn(vocab, HIDDEN, generator=generator) / 4
        if options.pop("rounded", False):  # integer logits: many ties, on either side of the cut
            weight[:, 0], weight[:, 1:] = torch.randint(-3, 4, (vocab,), generator=generator).float(), 0
            hidden = hidden.sign()
        targets = torch.randint(0, vocab, (TOKENS,), generator=generator)
        grads = torch.randn(2, TOKENS, generator=generator)
        local = -(-vocab // world)
        own = torch.full((local, HIDDEN), float("nan"))
        num_valid = max(0, min(local, vocab - rank * local))
        own[:num_valid] = weight[rank * local : rank * local + num_valid]
        hidden, own = hidden.to(dtype).requires_grad_(), own.to(dtype).requires_grad_()
        shard = VocabShard(rank * local, num_valid, group)
        scores = score_tokens(hidden, own, targets, shard, with_entropy=True, entropy_grad=True, **options)
        ((scores.log_probs * grads[0]).sum() + (scores.entropy * grads[1]).sum()).backward()
        rows = torch.zeros(local * world, HIDDEN, dtype=torch.float64)
        rows[rank * local : (rank + 1) * local] = own.grad.double()
        grad_hidden = hidden.grad.double()
        if group is not None:
            dist.all_reduce(rows)
            dist.all_reduce(grad_hidden)
        result = {"log_probs": scores.log_probs, "entropy": scores.entropy, "full": scores.full_log_probs}
        result |= {"outside": scores.outside, "grad_hidden": grad_hidden, "grad_weight": rows[:vocab]}
        result |= {"grad_padding": rows[vocab:]}
        results[name] = {key: value.detach() for key, value in result.items()}
    return results
