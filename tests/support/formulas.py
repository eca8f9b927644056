"""Training steps on the level of formulas: a toy decoder, and what a rank does with it.

A toy decoder in float64 (an embedding, a decaying causal sum, an output layer) stands for the model. Everything else is
the trainer's own: advantages, token weights, schedule, packing, context split, vocabulary shards, losses. The results
of a case are loss, gradient norm, gradients and metric sums of the first step.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime.algorithms import Algorithm
from slime.algorithms.advantages import ESTIMATORS, Arrays
from slime.algorithms.whole_batch import BatchLogProbs
from slime.core.batch import TrainBatch
from slime.data.context_split import split_context
from slime.ops.repeats import Repeats
from slime.training.model.log_probs import TokenScores, VocabShard, token_log_probs, token_values
from slime.training.model.row_shards import ContextShard
from slime.training.step.loss import ValueObjective, objective_of
from slime.training.step.micro_batch import MicroBatch, PreparedBatch, prepare, to_device, with_advantages
from tests.support.ranks import Seat
from tests.support.training import random_batch, training_args

Case = tuple[str, str]
"""(loss, aggregation)"""
VOCAB, HIDDEN, DECAY = 37, 6, 0.8
UNIFORM = -float(np.log(VOCAB))
"""Log-prob of a token under a uniform policy."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the world is cut, and this rank's groups."""

    dp_size: int
    tp_size: int
    cp_size: int
    dp_rank: int
    tp_rank: int
    cp_rank: int
    tp_group: Any
    cp_group: Any
    all_group: Any

    @classmethod
    def build(cls, dp: int, tp: int, cp: int) -> Layout:
        """Groups of neighbouring ranks: tensor, then context, then data parallel."""
        size, rank = dp * tp * cp, dist.get_rank()

        def group(key: Any) -> Any:
            mine = None
            for value in sorted({key(r) for r in range(size)}):
                members = [r for r in range(size) if key(r) == value]
                made = dist.new_group(members)
                mine = made if rank in members else mine
            return mine

        tp_group, cp_group = group(lambda r: r // tp), group(lambda r: (r // (tp * cp), r % tp))
        all_group = group(lambda r: 0)
        return cls(dp, tp, cp, rank // (tp * cp), rank % tp, rank // tp % cp, tp_group, cp_group, all_group)


def make_batch() -> TrainBatch:
    """Unequal samples in groups of four, with rewards at tokens; a fan-out, a fully masked sample, an unscored one, and
    one without rewards at tokens."""
    rng = np.random.default_rng(13)
    samples = [
        # Near the old log-probs, so that corrections bind for some tokens and not for all.
        dataclasses.replace(s, rollout_log_probs=rng.normal(UNIFORM, 0.3, s.response_length).astype(np.float32))
        for s in random_batch(3, 4, seed=5, vocab_size=VOCAB).samples
    ]
    samples[3] = dataclasses.replace(samples[3], index=samples[2].index)
    samples[6] = dataclasses.replace(samples[6], loss_mask=np.zeros_like(samples[6].loss_mask))
    samples[9] = dataclasses.replace(samples[9], reward=float("nan"))
    for p in range(len(samples) - 1):
        rewards = np.where(rng.random(samples[p].response_length) < 0.3, rng.normal(), 0.0)
        samples[p] = dataclasses.replace(samples[p], token_rewards=rewards)
    return TrainBatch(0, tuple(samples))


def make_log_probs(batch: TrainBatch) -> BatchLogProbs:
    """Log-probs around those of a uniform policy, so that clips and bounds bind for some tokens."""
    return _before_the_update(batch)[0]


def make_values(batch: TrainBatch) -> Arrays:
    """Values of a critic."""
    return _before_the_update(batch)[1]


def _before_the_update(batch: TrainBatch) -> tuple[BatchLogProbs, Arrays]:
    rng = np.random.default_rng(7)

    def around(center: float, spread: float) -> Arrays:
        return tuple(rng.normal(center, spread, s.response_length).astype(np.float32) for s in batch.samples)

    return BatchLogProbs(around(UNIFORM, 0.3), around(UNIFORM, 0.4), around(UNIFORM, 0.4)), around(0.0, 0.5)


def whole_scores(log_probs: Tensor, entropy: Tensor | None) -> TokenScores:
    """Of a model that samples from the whole vocabulary."""
    return TokenScores(log_probs, entropy, log_probs.detach(), torch.zeros_like(log_probs, dtype=torch.bool))


class Toy:
    """embedding [V, H], output [V, H] (this rank's rows), value head [1, H]; float64."""

    def __init__(self, layout: Layout) -> None:
        generator = torch.Generator().manual_seed(11)
        embedding, output, head = (
            torch.randn(n, HIDDEN, generator=generator, dtype=torch.float64) * 0.4 for n in (VOCAB, VOCAB, 1)
        )
        rows = -(-VOCAB // layout.tp_size)
        start = rows * layout.tp_rank
        padded = torch.cat([output, torch.full((rows * layout.tp_size - VOCAB, HIDDEN), 3.0, dtype=torch.float64)])
        self.embedding = embedding.requires_grad_()
        self.output = padded[start : start + rows].clone().requires_grad_()
        self.head = head.requires_grad_()
        self.shard = VocabShard(start, max(0, min(rows, VOCAB - start)), layout.tp_group)

    def hidden(self, batch: MicroBatch) -> Tensor:
        """[T, H]"""
        row = torch.nn.functional.embedding(batch.tokens, self.embedding)
        out = []
        for part in row.split(batch.packed.cu_seqlens_q.diff().tolist()):
            t = torch.arange(len(part))
            power = (t.unsqueeze(1) - t.unsqueeze(0)).double()
            out.append(torch.where(power >= 0, DECAY ** power.clamp_min(0), 0.0) @ part)
        return torch.cat(out).tanh()


class _SumOverVocabShards(torch.autograd.Function):
    """Hidden states pass; each shard adds its part to their gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def _copies(rows: np.ndarray) -> Repeats:
    """Of a row's keys, which the toy does not read."""
    return Repeats.of({name: torch.from_numpy(x) for name, x in Repeats.arrays(rows, int(rows.max()) + 1).items()})


def evaluate(toy: Toy, layout: Layout, batch: MicroBatch, *, what: str) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropy, or values, of all response tokens on every rank."""
    cu_seqlens = batch.packed.cu_seqlens_q
    cut = split_context(cu_seqlens.numpy(), cp_rank=layout.cp_rank, cp_size=layout.cp_size)
    names = ("positions", "local_index", "order", "place")
    indices = {name: torch.from_numpy(getattr(cut, name)) for name in names}
    lengths = tuple(cu_seqlens.diff().tolist())
    row_cut = ContextShard(
        layout.cp_group,
        **indices,
        keys=_copies(cut.key_rows),
        cu_lengths=cu_seqlens,
        lengths=lengths,
        cu_keys=cu_seqlens,
        key_lengths=lengths,
    )
    which, local = row_cut.owned(batch.predicting)
    states = toy.hidden(batch).index_select(0, row_cut.positions).index_select(0, local)
    size = batch.predicting.size(0)
    if what == "values":
        return row_cut.whole(token_values(states, toy.head), which, size), None
    states = _SumOverVocabShards.apply(states, layout.tp_group)
    targets = batch.target_tokens.index_select(0, which)
    log_probs, entropy = token_log_probs(
        states, toy.output, targets, toy.shard, with_entropy=True, entropy_grad=True, chunk_tokens=5
    )
    assert entropy is not None
    return row_cut.whole(log_probs, which, size), row_cut.whole(entropy, which, size)


def run(layout: Layout, prepared: PreparedBatch, args: Any, *, what: str) -> dict[str, Any]:
    """One optimizer step's loss and gradients, summed over the world."""
    toy = Toy(layout)
    by_values = what == "values"
    objective: Any = (
        ValueObjective(ESTIMATORS.build("ppo", args)) if by_values else objective_of(args, Algorithm.of(args))
    )
    total = torch.zeros((), dtype=torch.float64)
    sums: dict[str, Any] = {}
    for positions in prepared.schedule.steps[0].micro_batches[layout.dp_rank]:
        batch = to_device(prepared, positions, torch.device("cpu"), pad_each_to=2 * layout.cp_size)
        scores, entropy = evaluate(toy, layout, batch, what=what)
        parts = objective.loss(batch, scores if by_values else whole_scores(scores, entropy))
        parts.loss.backward()
        total += parts.loss.detach()
        for name, value in parts.sums.items():
            sums[name] = sums.get(name, 0.0) + value.double()
    # Loss and metrics are the same on all ranks of a replica: one of them speaks for it.
    speaks = float(layout.tp_rank == layout.cp_rank == 0)
    numbers = torch.stack([total, *(sums[name] for name in sorted(sums))]) * speaks
    dist.all_reduce(numbers, group=layout.all_group)
    output = torch.zeros(-(-VOCAB // layout.tp_size) * layout.tp_size, HIDDEN, dtype=torch.float64)
    if toy.output.grad is not None:
        output[toy.shard.start : toy.shard.start + len(toy.output)] = toy.output.grad
    shared = [torch.zeros_like(p) if p.grad is None else p.grad / layout.tp_size for p in (toy.embedding, toy.head)]
    gradients = [output[:VOCAB], *shared]
    for gradient in gradients:
        dist.all_reduce(gradient, group=layout.all_group)
    flat = torch.cat([g.flatten() for g in gradients])
    return {"loss": float(numbers[0]), "norm": float(flat.norm()), "gradient": flat, "sums": numbers[1:]}


def run_cases(seat: Seat, sizes: tuple[int, int, int], cases: dict[Case, dict[str, Any]]) -> dict[Case, Any]:
    """Results of every case, given as settings, under one layout (DP, TP, CP), on every rank of it."""
    with seat.world():
        layout = Layout.build(*sizes)
        batch = make_batch()
        log_probs, values = make_log_probs(batch), make_values(batch)
        results = {}
        for case, settings in cases.items():
            args = training_args(Path("unused"), **settings)
            algorithm = Algorithm.of(args)
            prepared = prepare(batch, args, algorithm, dp_size=layout.dp_size, cp_size=layout.cp_size)
            what = "values" if args.advantage_estimator == "ppo" else "log_probs"
            prepared = with_advantages(prepared, args, algorithm, log_probs, values)
            results[case] = run(layout, prepared, args, what=what)
        return results
