"""Losses and advantages against the `trl` package's own code, called and not copied: 1,000 random float64 batches each.

`GRPOTrainer._compute_loss` and `GRPOTrainer._generate_and_score_completions` run as they are on a stand-in for the
trainer whose model call returns given log-probs. Value and gradient with respect to every log-prob agree to 1e-6. Where
trl differs by design, our parameter that selects its side is used and named here:

* std epsilon: `epsilon=1e-4` (ours defaults to 1e-6).
* log-ratio clamp: trl has none, so `log_ratio_limit=0`, and poison cannot be masked by it.
* CISPO: `clip_low=None` and `clip_high` is the bound of the ratio itself (trl's `epsilon_high`), not 1 + epsilon.
* dual clip: trl's `delta` caps the ratio; for delta > 1 + eps_clip_high that is `eps_clip_c=delta`.
* sequence sum: trl's name is LUSPO; its paper's sequence ratio is not used, only its aggregation.
* masked positions: trl lets a NaN there through, so it gets finite numbers, while ours gets NaN (law 5).
* a sequence without trained tokens stays in trl's denominators: `count_masked=True`, our default.
* entropy: trl's bonus is the token mean whatever the aggregation is, so the two agree where the loss is a token mean.
* OPSM: trl measures drift from the sampler's log-probs if it has them; ours takes the log-probs it is given.
* unbiased KL: trl multiplies by its policy ratio, which is the sequence ratio for GSPO; ours is the token ratio always,
  so the two are compared at token level.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from slime.algorithms.advantages.grpo import group_advantages
from slime.algorithms.off_policy.masks import opsm_mask
from slime.algorithms.off_policy.tis import importance_weights
from slime.algorithms.policy_loss.cispo import cispo_loss
from slime.algorithms.policy_loss.ppo_clip import clipped_policy_loss, gspo_loss
from slime.algorithms.policy_loss.sapo import sapo_loss
from slime.algorithms.token_losses import Sequences
from tests.support.algorithms import kl_estimate, token_weights
from tests.unit.algorithms.trl_reference import Batch, Case, Trl, random_batch

NUM_BATCHES = 1000
TOLERANCE = 1e-6


def _sequences(b: Batch) -> Sequences:
    ids = torch.repeat_interleave(torch.arange(len(b.lengths)), torch.tensor(b.lengths))
    return Sequences(ids, len(b.lengths))


def _weights(b: Batch, aggregation: str) -> Tensor:
    """[R] by our aggregation over the whole batch."""
    masks = [m[:n].numpy().astype(np.float32) for m, n in zip(b.mask, b.lengths, strict=True)]
    executions = list(range(len(masks)))
    constant = b.max_length if aggregation == "constant_length" else None
    parts = token_weights(masks, executions, kind=aggregation, constant_length=constant, count_masked=True)
    return torch.from_numpy(np.concatenate(parts).astype(np.float64))


def _clip(b: Batch, new: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    return clipped_policy_loss(
        new, old, adv, mask, eps_clip=b.eps_low, eps_clip_high=b.eps_high, log_ratio_limit=0.0
    ).loss


def _dual_clip(b: Batch, new: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    return clipped_policy_loss(
        new, old, adv, mask, eps_clip=b.eps_low, eps_clip_high=b.eps_high, eps_clip_c=b.delta, log_ratio_limit=0.0
    ).loss


def _gspo(b: Batch, new: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    return gspo_loss(
        new, old, adv, mask, sequences=_sequences(b), eps_clip=b.eps_low, eps_clip_high=b.eps_high, log_ratio_limit=0.0
    ).loss


def _cispo(b: Batch, new: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    return cispo_loss(new, old, adv, mask, clip_low=None, clip_high=1 + b.eps_high, log_ratio_limit=0.0).loss


def _sapo(b: Batch, new: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    tau_positive, tau_negative = b.tau
    return sapo_loss(
        new, old, adv, mask, tau_positive=tau_positive, tau_negative=tau_negative, log_ratio_limit=0.0
    ).loss


CASES = {
    "grpo": Case(_clip, "sequence_mean", "grpo", kl=True),
    "grpo_dual_clip": Case(_dual_clip, "sequence_mean", "grpo", dual=True),
    "dapo": Case(_clip, "token_mean", "dapo", kl=True, unbiased=True),
    "dapo_entropy": Case(_clip, "token_mean", "dapo", entropy=True),
    "dr_grpo": Case(_clip, "constant_length", "dr_grpo", kl=True),
    "sequence_sum": Case(_clip, "sequence_sum", "luspo"),
    "gspo": Case(_gspo, "sequence_mean", "grpo", level="sequence", kl=True),
    "gspo_token_mean_opsm": Case(_gspo, "token_mean", "dapo", level="sequence", opsm=True),
    "cispo": Case(_cispo, "token_mean", "cispo", kl=True),
    "sapo": Case(_sapo, "sequence_mean", "sapo", kl=True, unbiased=True),
    "opsm": Case(_clip, "sequence_mean", "grpo", opsm=True),
}
"""Those with KL are without it in every third batch."""
MISMATCH = {
    "tis_token": Case(_clip, "sequence_mean", "grpo", mismatch=("token", "truncate")),
    "mis_token": Case(_clip, "token_mean", "dapo", mismatch=("token", "mask"), kl=True),
    "tis_sequence": Case(_clip, "constant_length", "dr_grpo", mismatch=("sequence", "truncate")),
    "mis_sequence": Case(_gspo, "sequence_mean", "grpo", level="sequence", mismatch=("sequence", "mask")),
    "mis_token_opsm": Case(_cispo, "token_mean", "cispo", mismatch=("token", "mask"), opsm=True),
}


def our_loss(case: Case, b: Batch, new: Tensor, advantages: Tensor) -> Tensor:
    """Our loss of the whole batch from log-probs [R] and the advantages of its sequences [S]."""
    mask, old, sampler = b.flat(b.mask, poison=False).double(), b.flat(b.old), b.flat(b.rollout)
    adv = b.flat(advantages[:, None].expand_as(b.old))
    loss = case.policy(b, new, old, adv, mask)
    if case.opsm:
        behaviour = sampler if case.mismatch else old
        loss = loss * opsm_mask(new, behaviour, adv, mask, _sequences(b), delta=b.opsm_delta)
    if case.mismatch:
        level, mode = case.mismatch
        loss = (
            loss
            * importance_weights(
                old, sampler, mask, _sequences(b), level=level, mode=mode, low=b.clip[0], high=b.clip[1]
            ).weight
        )
    if case.kl:
        loss = loss + b.beta * kl_estimate(new, b.flat(b.ref), mask, "k3", old_log_probs=old if case.unbiased else None)
    if case.entropy:
        loss = loss - b.beta * b.entropy[b.real]
    return (loss * _weights(b, case.aggregation)).sum()


@pytest.fixture(scope="module")
def trl() -> Iterator[Trl]:
    from trl.trainer.grpo_trainer import GRPOTrainer  # takes ten seconds

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield Trl(GRPOTrainer)
    torch.set_default_dtype(before)


def _check(case: Case, b: Batch, trl: Trl, inputs: dict[str, Tensor], num_micro_batches: int, where: str) -> None:
    theirs = b.new.clone().requires_grad_()
    want = trl.loss(case, b, theirs, inputs, num_micro_batches)
    want.backward()
    ours = b.flat(b.new).requires_grad_()
    got = our_loss(case, b, ours, inputs["advantages"])
    got.backward()
    assert theirs.grad is not None and ours.grad is not None, f"{where}: no gradient"
    assert abs(got.item() - want.item()) <= TOLERANCE, f"{where}: loss {got.item()}, trl {want.item()}"
    worst = float((ours.grad - theirs.grad[b.real]).abs().max())
    assert worst <= TOLERANCE, f"{where}: gradients differ by {worst}"


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_agree_with_trl(name: str, trl: Trl) -> None:
    case = CASES[name]
    for seed in range(NUM_BATCHES):
        b = random_batch(seed)
        inputs = {
            "prompt_ids": torch.ones(len(b.lengths), 1, dtype=torch.int64),
            "prompt_mask": torch.ones(len(b.lengths), 1, dtype=torch.int64),
            "completion_ids": torch.ones_like(b.mask),
            "completion_mask": b.real.long(),
            "tool_mask": b.mask,
            "advantages": b.advantages,
            "old_per_token_logps": b.old,
            "ref_per_token_logps": b.ref,
            "num_items_in_batch": b.mask.sum(),
        }
        # An even number of sequences also goes through trl in two micro-batches; ours has no such thing. Its entropy
        # bonus is a mean of micro-batch means, which is another number, so it stays whole there.
        cut = 2 if seed % 2 and len(b.lengths) % 2 == 0 and not case.entropy else 1
        _check(case, b, trl, inputs, cut, f"{name}, seed {seed}")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", MISMATCH)
def test_corrections_of_sampler_mismatch_agree_with_trl(name: str, trl: Trl) -> None:
    """Here trl computes the ratios and the advantages itself, from rewards and the sampler's log-probs."""
    case = MISMATCH[name]
    for seed in range(NUM_BATCHES):
        b = random_batch(seed)
        rewards = torch.from_numpy(np.random.default_rng(seed).integers(0, 3, len(b.lengths)) / 2.0)
        _check(case, b, trl, dict(trl.scored(case, b, rewards)), 1, f"{name}, seed {seed}")


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_group_advantages_agree_with_trl(trl: Trl) -> None:
    """Groups shuffled on our side, in order on trl's, whose groups are positions; some rewards are missing."""
    for seed in range(NUM_BATCHES):
        b, rng, scale = random_batch(seed), np.random.default_rng(seed), ["group", "batch", "none"][seed % 3]
        rewards = rng.choice([0.0, 1.0, 0.7, rng.normal()], len(b.lengths))
        rewards[rng.random(len(rewards)) < 0.1] = np.nan
        if np.isnan(rewards).sum() >= len(rewards) - 1:
            continue
        want = trl.scored(CASES["grpo"], b, torch.from_numpy(rewards), scale)["advantages"].numpy()
        order = rng.permutation(len(rewards))
        groups = (order // b.num_generations).tolist()
        got = group_advantages(rewards[order].tolist(), groups, order.tolist(), scale=scale, epsilon=1e-4)
        np.testing.assert_allclose(got, want[order], rtol=0, atol=TOLERANCE, err_msg=f"{scale}, seed {seed}")
