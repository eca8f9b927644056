"""The loss of a whole step, as the trainer puts it together, against a plain loop over samples and tokens.

The reference knows no schedule, packing, micro-batch or weight: for each sample it looks up log-probs in a table of
bigrams, computes advantages by the definition, and divides by the denominators of the step. The batch has a fan-out, a
sample without trained tokens and an unscored one. The trainer's side is split over ranks and micro-batches in several
ways, rank after rank in one process, so a denominator that is local to a rank or a micro-batch is a different number.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slime.algorithms import Algorithm
from slime.algorithms.whole_batch import BatchLogProbs
from slime.core.batch import TrainBatch, TrainSample
from slime.training.step.loss import objective_of
from slime.training.step.micro_batch import prepare, to_device, with_advantages
from tests.support.formulas import VOCAB, make_batch, make_log_probs, whole_scores
from tests.support.marks import quick
from tests.support.training import training_args

TOLERANCE = 1e-6
"""Relative to the gradient's norm; weights and advantages travel in float32."""
AGGREGATIONS = ("sequence_mean", "token_mean", "sequence_sum", "constant_length")
POLICY_LOSSES = ("ppo_clip", "gspo", "cispo", "sapo", "dppo")
SPLITS: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {"micro_batch_size": 100}),
    (1, {"micro_batch_size": 1}),
    (2, {"micro_batch_size": 3}),
    (4, {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 25, "balance_data": True}),
    (16, {"micro_batch_size": 1}),  # some ranks have a dummy
)
SETTINGS: dict[str, Any] = {
    "eps_clip": 0.1,
    "eps_clip_high": 0.2,
    "use_kl_loss": True,
    "kl_loss_coef": 0.3,
    "kl_loss_type": "k3",
    "entropy_coef": 0.05,
    "use_tis": True,
    "tis_clip": 1.3,
    "tis_clip_low": 0.6,
    "use_dynamic_global_batch_size": True,
}


def table() -> Tensor:
    """[VOCAB, VOCAB] log-odds of the next token; temperature has been applied."""
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64) * 0.3).requires_grad_()


def trainer_step(
    args: Any, batch: TrainBatch, before: BatchLogProbs, dp_size: int
) -> tuple[float, Tensor, dict[str, float]]:
    """(loss, gradient of the table, metric sums) over all ranks and micro-batches."""
    algorithm = Algorithm.of(args)
    prepared = with_advantages(prepare(batch, args, algorithm, dp_size=dp_size), args, algorithm, before)
    objective = objective_of(args, algorithm)
    logits, total, sums = table(), 0.0, dict[str, float]()
    assert len(prepared.schedule.steps) == 1, "one step"
    for rank in prepared.schedule.steps[0].micro_batches:
        for positions in rank:
            mb = to_device(prepared, positions, torch.device("cpu"), pad_to_multiple=8)
            log_p = logits.log_softmax(-1)[mb.tokens[mb.predicting]]
            entropy = -(log_p.exp() * log_p).sum(-1)
            parts = objective.loss(mb, whole_scores(log_p.gather(1, mb.target_tokens[:, None])[:, 0], entropy))
            parts.loss.backward()
            total += parts.loss.item()
            for name, value in parts.sums.items():
                sums[name] = sums.get(name, 0.0) + value.item()
    assert logits.grad is not None, "nothing was trained"
    return total, logits.grad, sums


def policy_loss_of(name: str, args: Any, r: Tensor, lp: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    """Loss of the tokens of one sample from the formulas of the papers."""
    if name == "cispo":
        return -r.detach().clamp(1 - args.eps_clip, 1 + args.eps_clip_high) * adv * lp
    if name == "sapo":
        tau = torch.where(adv > 0, 1.0, 1.05)
        return -4 / tau * torch.sigmoid(tau * (r - 1)) * adv
    if name == "dppo":
        away = adv * (r.detach() - 1) > 0
        far = (lp.exp() - lp.exp() / r).abs().detach() > args.dppo_divergence_threshold
        return torch.where(far & away, 0.0, -r * adv)
    if name == "gspo":
        r = ((r.log() * mask).sum() / mask.sum().clamp(min=1)).exp().detach() * r / r.detach()
    return -torch.minimum(r * adv, r.clamp(1 - args.eps_clip, 1 + args.eps_clip_high) * adv)


def execution_of(sample: TrainSample) -> tuple[int, int]:
    """Samples with the same are siblings."""
    return sample.group_index, sample.index


def plain_step(
    args: Any, batch: TrainBatch, before: BatchLogProbs, advantage: Callable[[int], Tensor]
) -> tuple[float, Tensor]:
    """(loss, gradient of the table) by the definition. `advantage(i)`: of each token of sample i."""
    logits = table()
    scored = [i for i, s in enumerate(batch.samples) if not np.isnan(s.reward)]
    executions = {execution_of(batch.samples[i]) for i in scored}
    num_tokens = sum(float(batch.samples[i].loss_mask.sum()) for i in scored)
    loss = torch.zeros((), dtype=torch.float64)
    for i in scored:
        s = batch.samples[i]
        first = s.num_tokens - s.response_length
        mask = torch.from_numpy(s.loss_mask).double()
        rows = [logits[int(s.tokens[t - 1])].log_softmax(-1) for t in range(first, s.num_tokens)]
        lp = torch.stack([row[int(s.tokens[first + k])] for k, row in enumerate(rows)])
        entropy = torch.stack([-(row.exp() * row).sum() for row in rows])
        assert before.old is not None and before.ref is not None and s.rollout_log_probs is not None, "all are there"
        old, ref, rollout = (
            torch.from_numpy(x[i] if isinstance(x, tuple) else x).double()
            for x in (before.old, before.ref, s.rollout_log_probs)
        )
        token = policy_loss_of(args.policy_loss, args, (lp - old).exp(), lp, advantage(i), mask)
        token = token * (old - rollout).exp().clamp(args.tis_clip_low, args.tis_clip)
        token = token + args.kl_loss_coef * ((ref - lp).exp() - 1 - (ref - lp)) - args.entropy_coef * entropy
        mine = [j for j in scored if execution_of(batch.samples[j]) == execution_of(s)]
        own = sum(float(batch.samples[j].loss_mask.sum()) for j in mine)
        denominator = {
            "sequence_mean": max(own, 1.0) * len(executions),
            "token_mean": num_tokens,
            "sequence_sum": len(executions),
            "constant_length": len(executions) * args.loss_constant_length,
        }[args.loss_aggregation]
        loss = loss + (token * mask).sum() / denominator
    loss.backward()
    assert logits.grad is not None, "nothing was trained"
    return loss.item(), logits.grad


def group_advantage(samples: tuple[TrainSample, ...], i: int) -> Tensor:
    """GRPO by its definition: fan-out counts once, the unscored not at all."""
    peers = [s for s in samples if s.group_index == samples[i].group_index and not np.isnan(s.reward)]
    own = [np.mean([s.reward for s in peers if s.index == e]) for e in sorted({s.index for s in peers})]
    value = (samples[i].reward - np.mean(own)) / (np.sqrt(np.var(own) * len(own) / (len(own) - 1)) + 1e-6)
    return torch.full((samples[i].response_length,), float(value), dtype=torch.float64)


def check(args: Any, batch: TrainBatch, before: BatchLogProbs, want: tuple[float, Tensor], dp_size: int) -> None:
    loss, gradient, sums = trainer_step(args, batch, before, dp_size)
    acted = sums["tis_clipfrac"] / sums["tis"]
    assert 0.05 < acted < 0.8, f"bounds that always or never act prove nothing: {acted}"
    norm = float(want[1].norm())
    assert norm > 1e-3, "a gradient of zero proves nothing"
    assert float((gradient - want[1]).norm()) <= TOLERANCE * norm
    assert loss == pytest.approx(want[0], abs=TOLERANCE * norm)
    assert sums["loss"] == pytest.approx(loss, abs=TOLERANCE * norm)


def problem() -> tuple[TrainBatch, BatchLogProbs]:
    """A batch whose engine is near the trainer, so that bounds of the mismatch act on some tokens and not on others."""
    batch, rng = make_batch(), np.random.default_rng(8)

    def near(s: TrainSample) -> TrainSample:
        rollout = rng.normal(-np.log(VOCAB), 0.2, s.response_length).astype(np.float32)
        return dataclasses.replace(s, rollout_log_probs=rollout, token_rewards=None)  # have tests of their own

    return TrainBatch(batch.rollout_id, tuple(near(s) for s in batch.samples)), make_log_probs(batch)


def shuffled(batch: TrainBatch, before: BatchLogProbs) -> tuple[TrainBatch, BatchLogProbs]:
    """The same samples in another order, groups apart."""
    order = np.random.default_rng(4).permutation(len(batch.samples))
    parts = [None if x is None else tuple(x[i] for i in order) for x in (before.old, before.ref, before.teacher)]
    return TrainBatch(batch.rollout_id, tuple(batch.samples[i] for i in order)), BatchLogProbs(*parts)


@pytest.mark.parametrize("name", quick(POLICY_LOSSES, "gspo"))
def test_a_step_is_what_the_definition_says(name: str) -> None:
    batch, before = shuffled(*problem())
    for aggregation in AGGREGATIONS:
        settings = {**SETTINGS, "policy_loss": name, "loss_aggregation": aggregation}
        args = training_args(Path("unused"), **settings)
        want = plain_step(args, batch, before, lambda i: group_advantage(batch.samples, i))
        for dp_size, split in SPLITS:
            check(training_args(Path("unused"), **settings, **split), batch, before, want, dp_size)


def counted_in_groups(batch: TrainBatch) -> TrainBatch:
    """The same executions, counted from 0 in every group, as a rollout of the user's may do."""
    first = {
        s.group_index: min(o.index for o in batch.samples if o.group_index == s.group_index) for s in batch.samples
    }
    samples = tuple(dataclasses.replace(s, index=s.index - first[s.group_index]) for s in batch.samples)
    return TrainBatch(batch.rollout_id, samples)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_an_execution_is_known_by_its_group_and_index(aggregation: str) -> None:
    batch, before = problem()
    settings = {**SETTINGS, "loss_aggregation": aggregation}
    args = training_args(Path("unused"), **settings)
    want = plain_step(args, batch, before, lambda i: group_advantage(batch.samples, i))
    again = counted_in_groups(batch)
    assert len({s.index for s in again.samples}) < batch.num_executions == again.num_executions, "nothing is shared"
    check(args, again, before, want, dp_size=2)


def test_a_reducer_of_the_users_counts_executions_as_an_aggregation_does() -> None:
    """Law: with `--drop-masked-executions` those without a trained token leave its denominator, too."""
    batch, _ = problem()
    bare = {execution_of(s) for s in batch.samples if s.is_scored and not s.loss_mask.any()}
    trained = {execution_of(s) for s in batch.samples if s.is_scored and s.loss_mask.any()}
    assert bare - trained, "every execution is trained: nothing is told apart"
    for dropped, executions in ((True, trained), (False, trained | bare)):
        args = training_args(Path("unused"), **SETTINGS, drop_masked_executions=dropped)
        prepared = prepare(batch, args, Algorithm.of(args), dp_size=1)
        assert max(prepared.units) == pytest.approx(1 / len(executions))


@pytest.mark.parametrize("name", ["ppo_clip", "gspo"])
def test_returns_with_kl_in_the_reward_and_a_teacher(name: str) -> None:
    """REINFORCE++: per-token returns from the last trained token on, teacher term, then whitening over the batch."""
    batch, before = problem()
    settings = {
        **SETTINGS,
        "policy_loss": name,
        "advantage_estimator": "reinforce_plus_plus",
        "gamma": 0.9,
        "kl_coef": 0.2,
        "kl_loss_type": "k3",
        "use_opd": True,
        "opd_type": "megatron",
        "opd_kl_coef": 0.4,
    }
    args = training_args(Path("unused"), **settings)
    assert before.old is not None and before.ref is not None and before.teacher is not None, "all are there"
    raw: dict[int, dict[int, float]] = {}
    for i, s in enumerate(batch.samples):
        carried, trained = 0.0, np.flatnonzero(s.loss_mask).tolist()
        raw[i] = {}
        for t in reversed(trained if not np.isnan(s.reward) else []):
            old, ref, teacher = (float(x[i][t]) for x in (before.old, before.ref, before.teacher))
            k3 = np.exp(ref - old) - 1 - (ref - old)
            carried = (s.reward if t == trained[-1] else 0.0) - 0.2 * k3 + 0.9 * carried
            raw[i][t] = carried - 0.4 * (old - teacher)
    every = np.array(list(itertools.chain.from_iterable(r.values() for r in raw.values())))

    def advantage(i: int) -> Tensor:
        out = torch.zeros(batch.samples[i].response_length, dtype=torch.float64)
        for t, value in raw[i].items():
            out[t] = float((value - every.mean()) / np.sqrt(every.var(ddof=1) + 1e-8))
        return out

    want = plain_step(args, batch, before, advantage)
    for dp_size, split in SPLITS:
        check(training_args(Path("unused"), **settings, **split), batch, before, want, dp_size)
