"""Estimators against exact expectations on a policy whose 64 sequences can all be enumerated.

The toy: three tokens of four letters, a table of logits for each of the 21 prefixes, a reward with three levels for
each sequence. Nothing is approximated in the reference: gradients are sums over all sequences, group statistics are
sums over all compositions of a group. Two kinds of tests:

* by enumeration: our loss on all 64 sequences, weighted with their probabilities, has exactly the right gradient;
* by sampling: 100,000 sequences through our advantages, losses and weights; cosine >= 0.999, means within 3 standard
  errors (along the direction of the exact gradient, for gradients).

What is exact and what is not, as the tests show it:

* On-policy, all policy losses have the policy gradient. Leave-one-out is unbiased; without division by the standard
  deviation, GRPO is (G - 1) / G of it; with it, the direction changes a little (a cosine of 0.9998 with groups of 16
  here, 0.9991 with 8), so the test has its own expectation beside the exact gradient.
* KL as a loss term sees prefixes as given, so its target is the gradient of the KL of each next token, averaged over
  the policy's prefixes. k2, and k1 and k3 times the ratio, have exactly that gradient; k3 alone is biased, k1 alone has
  none.
* k1 in the reward (with the sum of what follows as return) has the gradient of the KL of whole sequences.
* Sequence-level importance weights are unbiased until they are truncated or masked; both biases are measured.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from slime.algorithms.advantages.grpo import group_advantages, leave_one_out
from slime.algorithms.advantages.reinforce import discounted_returns
from slime.algorithms.advantages.returns import token_rewards
from slime.algorithms.off_policy.tis import importance_weights
from slime.algorithms.policy_loss.cispo import cispo_loss
from slime.algorithms.policy_loss.dppo import dppo_loss
from slime.algorithms.policy_loss.ppo_clip import clipped_policy_loss, gspo_loss
from slime.algorithms.policy_loss.sapo import sapo_loss
from slime.algorithms.token_losses import Sequences
from tests.support.algorithms import kl_estimate, token_weights
from tests.support.marks import quick

Array = npt.NDArray[np.float64]
NUM_SAMPLES = 100_000
GROUP = 16
"""The division by the deviation of so many keeps the direction to a cosine above 0.9995, and (G - 1) / G shows."""
LETTERS = np.array(list(itertools.product(range(4), repeat=3)))
"""[64, 3]"""
PREFIX = np.stack([0 * LETTERS[:, 0], 1 + LETTERS[:, 0], 5 + 4 * LETTERS[:, 0] + LETTERS[:, 1]], 1)
"""[64, 3] row of the logit table that gives each token's distribution."""
REWARD = 0.5 * (LETTERS[:, 0] == 2) + 0.5 * (LETTERS[:, 2] == LETTERS[:, 1])
"""[64] in {0, 0.5, 1}"""


def table(seed: int, scale: float = 0.7) -> Tensor:
    """Logits [21, 4] of a random policy."""
    return torch.from_numpy(np.random.default_rng(seed).normal(0, scale, (21, 4)))


def token_log_probs(logits: Tensor) -> Tensor:
    """[64, 3] log-prob of each token of each sequence."""
    return logits.log_softmax(-1)[torch.from_numpy(PREFIX), torch.from_numpy(LETTERS)]


def jacobian(logits: Tensor) -> Array:
    """[64, 3, 84] derivative of each token's log-prob with respect to the table."""
    full = torch.autograd.functional.jacobian(token_log_probs, logits)
    assert isinstance(full, Tensor), "one input, one output"
    return full.reshape(64, 3, -1).numpy()


POLICY = table(0)
REFERENCE = POLICY + table(1, 0.5)
SAMPLER = POLICY + table(2, 0.4)
LOG_P = token_log_probs(POLICY)
LOG_REF = token_log_probs(REFERENCE)
LOG_MU = token_log_probs(SAMPLER)
P: Array = LOG_P.sum(1).exp().numpy()
MU: Array = LOG_MU.sum(1).exp().numpy()
J = jacobian(POLICY)
SCORE = J.sum(1)
"""[64, 84] gradient of the log-prob of each sequence."""
EXACT = (P * REWARD) @ SCORE
"""[84] gradient of the expected reward."""


def cosine(a: Array, b: Array) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def draw(seed: int, probabilities: Array = P) -> npt.NDArray[np.int64]:
    """[NUM_SAMPLES] indices of sequences."""
    return np.random.default_rng(seed).choice(64, NUM_SAMPLES, p=probabilities)


Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Sequences], Tensor]
"""(log_probs, old, advantages, mask, sequences) -> loss of each token [R]."""
LOSSES: dict[str, Loss] = {
    "clip": lambda lp, old, a, m, s: clipped_policy_loss(lp, old, a, m, eps_clip=0.2).loss,
    "gspo": lambda lp, old, a, m, s: gspo_loss(lp, old, a, m, sequences=s, eps_clip=0.2).loss,
    "cispo": lambda lp, old, a, m, s: cispo_loss(lp, old, a, m, clip_low=None, clip_high=1.28).loss,
    "sapo": lambda lp, old, a, m, s: sapo_loss(lp, old, a, m).loss,
    "dppo": lambda lp, old, a, m, s: dppo_loss(lp, old, a, m, threshold=0.15).loss,
}


def loss_slopes(loss: Callable[[Tensor, Tensor, Sequences], Tensor], log_probs: Tensor, weights: Tensor) -> Array:
    """[N, 3] derivative of sum(weight * loss) with respect to each token's log-prob; `log_probs`, `weights` [N, 3]."""
    num = log_probs.shape[0]
    flat = log_probs.detach().reshape(-1).clone().requires_grad_()
    sequences = Sequences(torch.arange(num).repeat_interleave(3), num)
    (loss(flat, torch.ones_like(flat), sequences) * weights.reshape(-1)).sum().backward()
    assert flat.grad is not None, "the loss does not depend on the log-probs"
    return flat.grad.reshape(num, 3).numpy()


def sampled_gradient(name: str, rows: npt.NDArray[np.int64], advantages: Array) -> Array:
    """[84] minus the gradient of our loss: what the optimizer climbs. `advantages` [N] or [N, 3]."""
    num = len(rows)
    parts = token_weights([np.ones(3, np.float32)] * num, list(range(num)), kind="sequence_sum")
    per_token = torch.from_numpy(np.broadcast_to(advantages.reshape(num, -1), (num, 3)).copy())
    log_probs = LOG_P[rows]
    slopes = loss_slopes(
        lambda lp, mask, s: LOSSES[name](lp, log_probs.reshape(-1), per_token.reshape(-1), mask, s),
        log_probs,
        torch.from_numpy(np.stack(parts).astype(np.float64)),
    )
    total = np.zeros((64, 3))
    np.add.at(total, rows, slopes)
    return -np.einsum("st,std->d", total, J)


def by_groups(rows: npt.NDArray[np.int64], kind: str) -> Array:
    """[N] advantages of ours in groups of GROUP, whose members stand anywhere in blocks of 100 groups."""
    rng, out, block = np.random.default_rng(9), [], 100 * GROUP
    for start in range(0, len(rows), block):
        rewards = REWARD[rows[start : start + block]]
        groups, executions = rng.permutation(len(rewards)) // GROUP, list(range(len(rewards)))
        if kind == "rloo":
            out.append(leave_one_out(rewards.tolist(), groups.tolist(), executions))
        else:
            scale = {"dr_grpo": "none", "grpo": "group"}[kind]
            out.append(group_advantages(rewards.tolist(), groups.tolist(), executions, scale=scale))
    return np.concatenate(out)


def expected_advantage(kind: str) -> dict[float, float]:
    """Reward -> its mean advantage over all compositions of the other members of its group, by multinomial sums."""
    levels = [0.0, 0.5, 1.0]
    chance = [float(P[level == REWARD].sum()) for level in levels]
    out = {}
    for own in levels:
        mean = 0.0
        for a, b in itertools.product(range(GROUP), repeat=2):
            if a + b > GROUP - 1:
                continue
            counts = [a, b, GROUP - 1 - a - b]
            ways = math.factorial(GROUP - 1) / math.prod(math.factorial(c) for c in counts)
            probability = ways * math.prod(p**c for p, c in zip(chance, counts, strict=True))
            others = [level for level, c in zip(levels, counts, strict=True) for _ in range(c)]
            values = [*others, own]
            center = own - sum(values) / GROUP
            spread = math.sqrt(sum((v - sum(values) / GROUP) ** 2 for v in values) / (GROUP - 1))
            if kind == "grpo":
                mean += probability * (center / (spread + 1e-6) if spread else 0.0)
            else:
                mean += probability * (own - sum(others) / (GROUP - 1) if kind == "rloo" else center)
        out[own] = mean
    return out


@pytest.mark.parametrize("name", LOSSES)
def test_reinforce_by_enumeration(name: str) -> None:
    """On-policy every policy loss has the exact policy gradient."""
    advantages = torch.from_numpy(REWARD)[:, None].expand(64, 3).reshape(-1)
    slopes = loss_slopes(
        lambda lp, mask, s: LOSSES[name](lp, LOG_P.reshape(-1), advantages, mask, s),
        LOG_P,
        torch.from_numpy(P)[:, None].expand(64, 3),
    )
    np.testing.assert_allclose(-np.einsum("st,std->d", slopes, J), EXACT, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", quick(LOSSES, "clip"))
def test_reinforce_by_sampling(name: str) -> None:
    rows = draw(3)
    got = sampled_gradient(name, rows, REWARD[rows])
    assert cosine(got, EXACT) >= 0.999
    assert np.linalg.norm(got) == pytest.approx(np.linalg.norm(EXACT), rel=0.03)


@pytest.mark.parametrize("kind", quick(["rloo", "dr_grpo", "grpo"], "grpo"))
def test_group_estimators_by_sampling(kind: str) -> None:
    """GRPO's division by the deviation changes the direction a little; it stays within 0.999 of the exact gradient."""
    rows = draw(4)
    got = sampled_gradient("clip", rows, by_groups(rows, kind))
    expected = expected_advantage(kind)
    want = (P * np.array([expected[r] for r in REWARD])) @ SCORE
    assert cosine(got, want) >= 0.999
    assert cosine(got, EXACT) >= 0.999
    assert np.linalg.norm(got) == pytest.approx(np.linalg.norm(want), rel=0.03)
    if kind == "rloo":
        np.testing.assert_allclose(want, EXACT, rtol=0, atol=1e-12, err_msg="leave-one-out is unbiased")
    elif kind == "dr_grpo":
        np.testing.assert_allclose(want, EXACT * (GROUP - 1) / GROUP, rtol=0, atol=1e-12)
    else:
        assert cosine(want, EXACT) < 1 - 1e-6, "dividing by the standard deviation is a different direction"


def _kl_exact() -> tuple[float, Array, Array]:
    """(KL of sequences, its gradient [84], the part of that gradient that sees prefixes as given [84])."""
    x = (LOG_P - LOG_REF).numpy()
    sequence = x.sum(1)
    return float(P @ sequence), (P * sequence) @ SCORE, np.einsum("s,st,std->d", P, x, J)


KL_MEANS = [("k1", False), ("k3", False), ("low_var_kl", False), ("k1", True), ("k3", True), ("k2", False)]


@pytest.mark.parametrize(("kind", "unbiased"), KL_MEANS)
def test_kl_means(kind: str, unbiased: bool) -> None:
    """k1 and k3 are unbiased; k2 is not: its mean is off by a known, small part of the KL."""
    exact = _kl_exact()[0]
    one = torch.ones(64 * 3, dtype=torch.float64)
    flat = LOG_P.reshape(-1)
    value = kl_estimate(flat, LOG_REF.reshape(-1), one, kind, old_log_probs=flat if unbiased else None)
    per_sequence = value.reshape(64, 3).sum(1).numpy()
    bias = float(P @ per_sequence) - exact
    sampled = per_sequence[draw(5)]
    error = sampled.std(ddof=1) / math.sqrt(NUM_SAMPLES)
    if kind == "k2":
        assert 0.005 < abs(bias) / exact < 0.3, f"k2's bias is {bias / exact:.1%} of the KL"
        assert abs(sampled.mean() - exact) > 3 * error, "the sampled mean shows the bias, too"
    else:
        assert abs(bias) < 1e-12
    assert abs(sampled.mean() - exact - bias) <= 3 * error


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_kl_off_policy(kind: str) -> None:
    """Sampled by another policy, times the ratio: the KL of each next token, averaged over that policy's prefixes."""
    one = torch.ones(64 * 3, dtype=torch.float64)
    value = kl_estimate(LOG_P.reshape(-1), LOG_REF.reshape(-1), one, kind, old_log_probs=LOG_MU.reshape(-1))
    divergence = (POLICY.softmax(-1) * (POLICY.log_softmax(-1) - REFERENCE.log_softmax(-1))).sum(-1).numpy()
    want = float(MU @ divergence[PREFIX].sum(1))
    assert float(MU @ value.reshape(64, 3).sum(1).numpy()) == pytest.approx(want, abs=1e-12)


def _kl_slopes(kind: str, unbiased: bool, weights: Tensor, rows: npt.NDArray[np.int64]) -> Array:
    old, ref = LOG_P[rows].reshape(-1), LOG_REF[rows].reshape(-1)
    return loss_slopes(
        lambda lp, mask, s: kl_estimate(lp, ref, mask, kind, old_log_probs=old if unbiased else None),
        LOG_P[rows],
        weights,
    )


KL_GRADIENTS = [("k2", False), ("k1", True), ("k3", True), ("k3", False), ("k1", False)]


@pytest.mark.parametrize(("kind", "unbiased"), KL_GRADIENTS)
def test_kl_gradients_as_a_loss(kind: str, unbiased: bool) -> None:
    _, _, want = _kl_exact()
    right = kind == "k2" or unbiased
    weights = torch.from_numpy(P)[:, None].expand(64, 3)
    expected = np.einsum("st,std->d", _kl_slopes(kind, unbiased, weights, np.arange(64)), J)
    if right:
        np.testing.assert_allclose(expected, want, rtol=0, atol=1e-12)
    elif kind == "k3":
        assert np.linalg.norm(expected - want) > 0.1 * np.linalg.norm(want), "k3 as a loss is biased"
    else:
        np.testing.assert_allclose(expected, 0, rtol=0, atol=1e-12, err_msg="k1 as a loss does nothing")
    rows = draw(6)
    slopes = _kl_slopes(kind, unbiased, torch.ones(NUM_SAMPLES, 3, dtype=torch.float64), rows)
    # Along the exact gradient, a sample's part is a number, so its mean has a standard error.
    along = (slopes * (J @ (want / np.linalg.norm(want)))[rows]).sum(1)
    error = along.std(ddof=1) / math.sqrt(NUM_SAMPLES)
    distance = abs(along.mean() - np.linalg.norm(want))
    assert (distance <= 3 * error) == right, f"{distance} from the exact gradient, standard error {error}"


def test_kl_in_the_reward_has_the_gradient_of_the_sequence_kl() -> None:
    """The return of a token is minus the k1 of what follows; the policy gradient then climbs down the exact KL."""
    _, full, given_prefix = _kl_exact()
    x = (LOG_P - LOG_REF).numpy()
    mask = np.ones(3, np.float32)
    returns = np.stack([discounted_returns(token_rewards(0.0, mask, kl=k, kl_coef=1.0), mask, 1.0) for k in x])
    slopes = loss_slopes(
        lambda lp, m, s: LOSSES["clip"](lp, LOG_P.reshape(-1), torch.from_numpy(returns.reshape(-1)), m, s),
        LOG_P,
        torch.from_numpy(P)[:, None].expand(64, 3),
    )
    climbed = -np.einsum("st,std->d", slopes, J)
    np.testing.assert_allclose(climbed, -full, rtol=0, atol=1e-12)
    assert np.linalg.norm(full - given_prefix) > 0.05 * np.linalg.norm(full), "what follows a token matters here"
    rows = draw(7)
    assert cosine(sampled_gradient("clip", rows, returns[rows]), -full) >= 0.999


def _weights(level: str, mode: str, low: float, high: float) -> Array:
    """[64, 3] our weights from the sampler to the policy."""
    one = torch.ones(64 * 3, dtype=torch.float64)
    sequences = Sequences(torch.arange(64).repeat_interleave(3), 64)
    flat = LOG_P.reshape(-1), LOG_MU.reshape(-1)
    result = importance_weights(*flat, one, sequences, level=level, mode=mode, low=low, high=high)
    return result.weight.reshape(64, 3).numpy()


def test_sequence_importance_sampling_is_unbiased_and_truncation_is_not() -> None:
    """Rewards are not negative, so both corrections lose expected reward; masking loses more than truncation."""
    exact, rows = float(P @ REWARD), draw(8, MU)
    biases = {}
    for name, mode, low, high in [
        ("plain", "truncate", 0.0, 1e9),
        ("truncated", "truncate", 0.0, 1.5),
        ("masked", "mask", 0.0, 1.5),
    ]:
        value = _weights("sequence", mode, low, high)[:, 0] * REWARD
        biases[name] = float(MU @ value) - exact
        sampled = value[rows]
        error = sampled.std(ddof=1) / math.sqrt(NUM_SAMPLES)
        assert abs(sampled.mean() - exact - biases[name]) <= 3 * error, name
        if name != "plain":
            assert exact - sampled.mean() > 3 * error, f"{name}: the bias {biases[name]} is visible"
    assert abs(biases["plain"]) < 1e-12
    assert -0.2 * exact < biases["truncated"] < -0.005 * exact, biases
    assert biases["masked"] < 2 * biases["truncated"], biases
    uncorrected = float(MU @ REWARD) - exact
    assert abs(biases["truncated"]) < abs(uncorrected), "the truncated estimate is nearer than none"


def test_importance_weights_in_the_policy_gradient() -> None:
    """Sampled by another policy: sequence weights give the exact gradient; token weights ignore what came before.

    The weights are computed from the log-probs that are trained, so they must have no gradient of their own.
    """
    advantages = torch.from_numpy(REWARD)[:, None].expand(64, 3).reshape(-1)

    def gradient(level: str) -> Array:
        def loss(lp: Tensor, mask: Tensor, s: Sequences) -> Tensor:
            weight = importance_weights(lp, LOG_MU.reshape(-1), mask, s, level=level, low=0.0, high=1e9).weight
            return LOSSES["clip"](lp, LOG_P.reshape(-1), advantages, mask, s) * weight

        slopes = loss_slopes(loss, LOG_P, torch.from_numpy(MU)[:, None].expand(64, 3))
        return -np.einsum("st,std->d", slopes, J)

    np.testing.assert_allclose(gradient("sequence"), EXACT, rtol=0, atol=1e-12)
    assert np.linalg.norm(gradient("token") - EXACT) > 0.01 * np.linalg.norm(EXACT)
