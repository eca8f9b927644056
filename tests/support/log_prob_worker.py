"""Scores random tokens with the vocabulary cut over gloo ranks: `python -m tests.support.log_prob_worker FOLDER RANK
WORLD`.

Every rank holds `ceil(V / WORLD)` rows, padded with NaN; a rank may hold padding alone. Rank 0 writes
`<name>_<world>.pt` for each of `SCENARIOS`: log-probs, entropy, full log-probs, outside, and the gradients of hidden
states (summed over the ranks) and weight (valid rows of all ranks).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

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


def main(folder: str, rank: int, world: int) -> None:
    """Runs one rank."""
    import torch
    import torch.distributed as dist

    from slime.training.model.log_probs import VocabShard, score_tokens

    torch.set_num_threads(1)
    group = None
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store_{world}", rank=rank, world_size=world)
        group = dist.group.WORLD
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
        if rank == 0:
            torch.save({key: value.detach() for key, value in result.items()}, f"{folder}/{name}_{world}.pt")
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
