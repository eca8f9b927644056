"""Rewards at tokens and turns: what each estimator makes of them, against plain NumPy and against figures by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.algorithms import Algorithm
from slime.algorithms.advantages import ESTIMATORS
from slime.algorithms.whole_batch import BatchLogProbs, RolloutView, advantages_and_returns, check_samples
from slime.core.batch import TrainBatch, TrainSample
from slime.core.errors import DataError
from slime.core.sample import NOT_SAMPLED, Sample, credited_rewards, sum_of_rewards
from tests.support.training import training_args

Turns = list[tuple[int, int, float]]
"""(sampled tokens, observation tokens after them, reward) of each turn."""


def sample(group: int, index: int, reward: float, turns: Turns, **changes: Any) -> TrainSample:
    """A prompt of two tokens, then turns; the reward of a turn is at its last sampled token."""
    one = Sample(group_index=group, index=index, tokens=[1, 2], reward=reward)
    for num, between, value in turns:
        one.append_response_tokens([7] * num, log_probs=[-1.0] * num, weight_version=1, finish_reason="stop")
        one.add_turn_reward(value)
        one.append_response_tokens([8] * between)
    return dataclasses.replace(TrainSample.from_sample(one, reward=reward), **changes)


def advantages(samples: list[TrainSample], values: Any = None, kl: bool = False, **settings: Any) -> list[np.ndarray]:
    args = training_args(Path("unused"), **settings)
    zeros = tuple(np.zeros(s.response_length) for s in samples)
    log_probs = BatchLogProbs(old=tuple(z + 0.5 for z in zeros), ref=zeros) if kl else BatchLogProbs(old=zeros)
    batch = TrainBatch(0, tuple(samples))
    made = advantages_and_returns(batch, args, Algorithm.of(args), log_probs, values)
    return [np.asarray(a) for a in made.advantages]


GAME = [
    sample(0, 0, 1.0, [(2, 1, 0.25), (1, 2, 1.0), (1, 0, 0.0)]),
    sample(0, 1, 0.0, [(1, 1, 1.0), (1, 0, 0.0)]),
    sample(0, 2, 0.0, [(1, 0, 0.0)]),
]
"""Returns of the turns (gamma 1/2): 1, 1.5, 1 and 1, 0 and 0."""


def test_the_example_by_hand() -> None:
    """Turn 0: 1, 1, 0 with mean 2/3 and deviation 1/sqrt(3). Turn 1: 1.5, 0 with mean 3/4 and deviation 1.5/sqrt(2).
    Turn 2 was reached once, so there is nothing to compare."""
    got = advantages(GAME, advantage_estimator="grpo_turn", gamma=0.5, advantage_epsilon=0.0)
    third, half = np.sqrt(3) / 3, np.sqrt(2) / 2
    assert got[0] == pytest.approx(np.array([third, third, 0, half, 0, 0, 0]), abs=1e-12)
    assert got[1] == pytest.approx(np.array([third, 0, -half]), abs=1e-12)
    assert got[2] == pytest.approx(np.array([-2 * third]), abs=1e-12)
    assert got[0][-1] == 0.0, "exactly zero"
    whole = advantages(GAME, advantage_estimator="grpo", grpo_std_normalization=False)
    assert [a[0] for a in whole] == pytest.approx([7 / 6, -1 / 12, -13 / 12]), "totals are 9/4, 1 and 0"


def test_the_printed_figures_of_the_example() -> None:
    got = np.concatenate(advantages(GAME, advantage_estimator="grpo_turn", gamma=0.9))
    want = [0.993127, 0.993127, 0, 0.707106, 0, 0, 0, 0.013604, 0, -0.707106, -1.006732]
    assert got == pytest.approx(np.array(want), abs=1e-6)


def test_with_one_deviation_for_the_step_a_small_difference_stays_small() -> None:
    """Law: of two executions, the group's deviation makes each difference +-0.707; the step's keeps the ratio."""
    solved = [sample(0, 0, 1.0, [(1, 0, 0.0)]), sample(0, 1, 0.0, [(1, 0, 0.0)])]
    unsolved = [sample(1, 2, 0.0, [(1, 0, 0.25)]), sample(1, 3, 0.0, [(1, 0, 0.15)])]
    settings: dict[str, Any] = {"advantage_estimator": "grpo_turn", "gamma": 0.5, "advantage_epsilon": 0.0}
    by_group = np.concatenate(advantages([*solved, *unsolved], **settings))
    assert by_group == pytest.approx(np.array([1, -1, 1, -1]) * np.sqrt(0.5))
    by_step = np.concatenate(advantages([*solved, *unsolved], **settings, advantage_scale="batch"))
    assert by_step == pytest.approx(np.array([0.5, -0.5, 0.05, -0.05]) / np.std([1.0, 0.0, 0.25, 0.15], ddof=1))


def random_samples(num_groups: int = 4, seed: int = 3) -> list[TrainSample]:
    """Groups of four executions of up to five turns: fan-outs, masked turns, a removed sample, an unscored one."""
    rng = np.random.default_rng(seed)
    made = []
    for n in range(num_groups * 4):
        turns = [(int(rng.integers(1, 5)), int(rng.integers(1, 4)), float(rng.normal())) for _ in range(1 + n % 5)]
        made.append(sample(n // 4, n, float(rng.normal()), turns))
    made.insert(3, dataclasses.replace(made[2], reward=0.25, loss_mask=_without_turn(made[2], 0)))
    made[14] = dataclasses.replace(made[14], loss_mask=_without_turn(made[14], 1))
    made[6] = dataclasses.replace(made[6], loss_mask=np.zeros_like(made[6].loss_mask))
    made[8] = dataclasses.replace(made[8], reward=float("nan"))
    made[10] = dataclasses.replace(made[10], token_rewards=None)
    return made


def _without_turn(one: TrainSample, turn: int) -> np.ndarray:
    mask, run = one.loss_mask.copy(), oracle_runs(one)[turn]
    mask[run.start : run.stop] = 0.0
    return mask


def oracle_runs(one: TrainSample) -> list[range]:
    """The sampled tokens of each turn."""
    runs, start = [], None
    for t in range(one.response_length + 1):
        acted = t < one.response_length and one.token_versions[t] != NOT_SAMPLED
        if acted and start is None:
            start = t
        if not acted and start is not None:
            runs.append(range(start, t))
            start = None
    return runs


def oracle_turns(samples: list[TrainSample], gamma: float, eps: float) -> list[np.ndarray]:
    """Turn-level GRPO, written from the formula with loops over turns, groups and executions."""
    returns: dict[tuple[int, int], float] = {}
    table: dict[tuple[int, int], dict[int, list[float]]] = {}
    for p, one in enumerate(samples):
        runs = oracle_runs(one)
        for k, run in enumerate(runs):
            g = 0.0
            for j in range(k, len(runs)):
                end = runs[j + 1].start if j + 1 < len(runs) else one.response_length
                r = 0.0 if one.token_rewards is None else float(sum(one.token_rewards[runs[j].start : end]))
                g += gamma ** (j - k) * (r + (one.reward if j == len(runs) - 1 else 0.0))
            returns[p, k] = g
            takes_part = any(one.loss_mask[t] for t in run) or not one.loss_mask.any()
            if takes_part and not np.isnan(one.reward):
                table.setdefault((one.group_index, k), {}).setdefault(one.index, []).append(g)
    out = []
    for p, one in enumerate(samples):
        mine = np.zeros(one.response_length)
        for k, run in enumerate(oracle_runs(one)):
            own = [float(np.mean(v)) for v in table.get((one.group_index, k), {}).values()]
            if len(own) > 1 and not np.isnan(one.reward):
                for t in run:
                    mine[t] = one.loss_mask[t] * (returns[p, k] - np.mean(own)) / (np.std(own, ddof=1) + eps)
        out.append(mine)
    return out


@pytest.mark.parametrize("gamma", [1.0, 0.7, 0.0])
def test_turns_are_compared_as_the_formula_says(gamma: float) -> None:
    samples = random_samples()
    want = oracle_turns(samples, gamma, 1e-6)
    got = advantages(samples, advantage_estimator="grpo_turn", gamma=gamma)
    assert np.abs(np.concatenate(want)).max() > 1.0, "a signal"
    assert np.concatenate(got) == pytest.approx(np.concatenate(want), abs=1e-12)


def oracle_rewards(one: TrainSample) -> np.ndarray:
    """u_t: a reward at an untrained token goes to the last trained one before it; the outcome is at the last one."""
    out = np.zeros(one.response_length)
    trained = [t for t in range(one.response_length) if one.loss_mask[t] > 0]
    if np.isnan(one.reward) or not trained:
        return out
    for t, r in enumerate([] if one.token_rewards is None else one.token_rewards):
        before = [s for s in trained if s <= t]
        if before:
            out[before[-1]] += float(r)
    out[trained[-1]] += one.reward
    return out


@pytest.mark.parametrize("kl", [False, True])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_returns_and_gae_are_those_of_the_serial_recursion(gamma: float, kl: bool) -> None:
    samples, rng = random_samples(), np.random.default_rng(1)
    values = tuple(rng.normal(size=s.response_length) for s in samples)
    coef, lambd = 0.1 if kl else 0.0, 0.8
    settings: dict[str, Any] = {"gamma": gamma, "kl_coef": coef, "kl_loss_type": "k1", "normalize_advantages": False}
    returns = advantages(samples, kl=kl, advantage_estimator="reinforce_plus_plus", **settings)
    gae = advantages(samples, values, kl=kl, advantage_estimator="ppo", lambd=lambd, **settings)
    for p, one in enumerate(samples):
        u, g, a, after = oracle_rewards(one) - coef * 0.5 * (one.loss_mask > 0), 0.0, 0.0, 0.0
        for t in reversed(np.flatnonzero(one.loss_mask)):
            g = u[t] + gamma * g
            a = u[t] + gamma * after - values[p][t] + gamma * lambd * a
            after = values[p][t]
            assert returns[p][t] == pytest.approx(g, abs=1e-9)
            assert gae[p][t] == pytest.approx(a, abs=1e-9)
        assert not returns[p][one.loss_mask == 0].any() and not gae[p][one.loss_mask == 0].any()


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_whole_responses_are_compared_by_reward_plus_token_rewards(name: str) -> None:
    """An absolute oracle for the totals, and the reward alone once a hook of the user made it final."""
    samples = random_samples()
    totals = [s.reward + float(sum(oracle_rewards(s)) - s.reward if s.loss_mask.any() else _sum(s)) for s in samples]
    in_one = [dataclasses.replace(s, reward=t, token_rewards=None) for s, t in zip(samples, totals, strict=True)]
    settings: dict[str, Any] = {"advantage_estimator": name, "normalize_advantages": False}
    got, want = advantages(samples, **settings), advantages(in_one, **settings)
    assert np.concatenate(got) == pytest.approx(np.concatenate(want), abs=1e-9)
    final = {**settings, "custom_reward_post_process_path": "tests.support.probe_hooks:nothing"}
    plain = [dataclasses.replace(s, token_rewards=None) for s in samples]
    for a, b in zip(advantages(samples, **final), advantages(plain, **final), strict=True):
        np.testing.assert_array_equal(a, b)


def _sum(one: TrainSample) -> float:
    return 0.0 if one.token_rewards is None else float(sum(one.token_rewards))


def samples_for(name: str) -> list[TrainSample]:
    """Random samples; with rewards that are not negative for maxrl, which refuses others."""
    if name != "maxrl":
        return random_samples()
    return [
        dataclasses.replace(
            s, reward=abs(s.reward), token_rewards=None if s.token_rewards is None else np.abs(s.token_rewards)
        )
        for s in random_samples()
    ]


@pytest.mark.parametrize("name", ESTIMATORS.names())
def test_the_order_of_samples_changes_nothing(name: str) -> None:
    samples = samples_for(name)
    order = np.random.default_rng(2).permutation(len(samples))
    values = tuple(np.linspace(0, 1, s.response_length) for s in samples)
    critic = ESTIMATORS.get(name).needs_critic
    got = advantages(samples, values if critic else None, advantage_estimator=name)
    mixed = [samples[p] for p in order]
    again = advantages(mixed, tuple(values[p] for p in order) if critic else None, advantage_estimator=name)
    for place, p in enumerate(order):
        assert again[place] == pytest.approx(got[p], abs=1e-12)


@pytest.mark.parametrize("name", ["grpo_turn", "reinforce_plus_plus"])
def test_an_execution_can_train_each_turn_in_a_sample_of_its_own(name: str) -> None:
    """Law 3: siblings that hold all tokens and train one turn each have the advantages of the single sample."""
    whole = [sample(0, n, float(n % 2), [(2, 1, 0.5 * n), (3, 2, -1.0), (1, 0, float(n == 1))]) for n in range(3)]
    apart = []
    for one in whole:
        for run in oracle_runs(one):
            mask = np.zeros_like(one.loss_mask)
            mask[run.start : run.stop] = 1.0
            apart.append(dataclasses.replace(one, loss_mask=mask))
    settings: dict[str, Any] = {"advantage_estimator": name, "normalize_advantages": False}
    got, parts = advantages(whole, **settings), advantages(apart, **settings)
    for p in range(3):
        assert sum(parts[3 * p : 3 * p + 3]) == pytest.approx(got[p], abs=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS.names())
def test_rewards_of_zero_change_no_bit(name: str) -> None:
    samples = [dataclasses.replace(s, token_rewards=None) for s in samples_for(name)]
    zeros = [dataclasses.replace(s, token_rewards=np.zeros(s.response_length)) for s in samples]
    values = tuple(np.linspace(0, 1, s.response_length) for s in samples) if ESTIMATORS.get(name).needs_critic else None
    plain = advantages(samples, values, advantage_estimator=name)
    for a, b in zip(plain, advantages(zeros, values, advantage_estimator=name), strict=True):
        assert a == pytest.approx(b, abs=1e-12) if name == "reinforce_plus_plus" else (a == b).all()


def test_a_reward_at_a_masked_token_counts_at_the_last_trained_token_before_it() -> None:
    rewards = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    assert credited_rewards(rewards, np.array([0, 1, 0, 0, 1, 0])).tolist() == [0, 14, 0, 0, 48, 0]
    assert sum_of_rewards(rewards, np.array([0, 1, 0, 0, 1, 0])) == 62.0, "the first belongs to another sibling"
    assert credited_rewards(rewards, np.ones(6)).tolist() == rewards.tolist()
    assert not credited_rewards(rewards, np.zeros(6)).any() and sum_of_rewards(rewards, np.zeros(6)) == 63.0
    assert credited_rewards(rewards[:0], rewards[:0]).tolist() == [] and sum_of_rewards(rewards[:0], rewards[:0]) == 0


@pytest.mark.parametrize("wrong", [np.ones(3), np.full(7, np.nan)])
def test_a_wrong_column_is_refused_with_the_sample_named(wrong: np.ndarray) -> None:
    args = training_args(Path("unused"))
    broken = dataclasses.replace(GAME[0], token_rewards=wrong)
    with pytest.raises(DataError, match="token_rewards of sample 0 in group 0 must be 7 finite numbers"):
        check_samples([GAME[1], broken], args, Algorithm.of(args))


def test_advantage_functions_see_token_rewards_and_the_users_metadata() -> None:
    tagged = dataclasses.replace(GAME[1], metadata={"turns": [1, 0]})
    view = RolloutView(
        TrainBatch(0, (GAME[2], tagged, dataclasses.replace(GAME[0], token_rewards=None))),
        *((s.loss_mask for s in GAME), BatchLogProbs(), None, None, lambda: np.zeros(3)),
    )
    data = view.as_dict()
    assert [r.tolist() for r in data["token_rewards"]] == [[0.0], [1.0, 0.0, 0.0], [0.0] * 7]
    assert data["metadata"] == [None, {"turns": [1, 0]}, None]
    data["metadata"][1]["turns"].clear()
    assert view.as_dict()["metadata"][1] == {"turns": [1, 0]}, "each call gets its own"
    none = dataclasses.replace(
        view, batch=TrainBatch(0, tuple(dataclasses.replace(s, token_rewards=None) for s in GAME))
    )
    assert none.as_dict()["token_rewards"] is None
