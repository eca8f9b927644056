"""Log-probs and advantages of a real backend: critic, teacher, reference in the reward, users' functions, NaN."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime.core.batch import TrainSample
from slime.core.errors import DataError, HookError, NumericsError
from tests.support.tiny import write_tiny_model
from tests.support.training import random_batch, with_samples

Make = Callable[..., Any]


def _weights(backend: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.iter_hf_tensors()}


def test_ppo_trains_a_critic_that_learns_the_returns(tiny_qwen3: Path, make_backend: Make) -> None:
    """Answers of one group get 1, of the other 0: values move towards what each prompt's tokens lead to."""
    backend = make_backend(tiny_qwen3, advantage_estimator="ppo", gamma=1.0, lambd=1.0, num_critic_only_steps=2)
    batch = random_batch(2, 4, seed=3)
    batch = with_samples(batch, [dataclasses.replace(s, reward=float(s.group_index == 0)) for s in batch.samples])
    before = _weights(backend)
    first = backend.train(batch)
    assert first["train/critic-values"] == 0.0, "a value head starts at zero"
    assert "train/loss" not in first and all(torch.equal(before[n], t) for n, t in _weights(backend).items())
    assert first["train/train_rollout_logprob_abs_diff_max"] > 0, "engines are compared in steps of the critic, too"
    losses = [first["train/critic-value_loss"]]
    for rollout_id in (1, 2, 3, 4):
        metrics = backend.train(dataclasses.replace(batch, rollout_id=rollout_id))
        losses.append(metrics["train/critic-value_loss"])
    assert losses[-1] < 0.7 * losses[0], losses
    assert metrics["train/pg_loss"] != 0.0 and metrics["train/critic-grad_norm"] > 0
    assert any(not torch.equal(before[n], t) for n, t in _weights(backend).items())


def test_a_critic_resumes_with_the_policy(tiny_qwen3: Path, tmp_path: Path, make_backend: Make) -> None:
    settings: dict[str, Any] = {"advantage_estimator": "ppo", "gamma": 0.99, "lambd": 0.95}
    batches = [random_batch(seed=s) for s in range(2)]
    whole = make_backend(tiny_qwen3, **settings)
    whole.train(batches[0])
    whole.save(tmp_path / "mid")
    want = whole.train(batches[1])
    resumed = make_backend(tiny_qwen3, **settings)
    resumed.load(tmp_path / "mid")
    assert resumed.train(batches[1]) == want


def test_a_teacher_draws_the_student(tiny_qwen3: Path, tmp_path: Path, make_backend: Make) -> None:
    """Equal rewards and a teacher: the only signal is the teacher's, and its tokens become likelier."""
    teacher = write_tiny_model(tmp_path / "teacher", "qwen3", tied=False, seed=5)
    batch = random_batch(seed=6)
    batch = with_samples(batch, [dataclasses.replace(s, reward=1.0) for s in batch.samples])
    judged = make_backend(teacher).log_probs(batch)
    backend = make_backend(tiny_qwen3, use_opd=True, opd_type="megatron", opd_teacher_load=str(teacher))
    before, kept = backend.log_probs(batch), _weights(backend)
    prepared = backend.with_advantages(batch)
    for sample, own, other, got in zip(batch.samples, before, judged, prepared.aims.advantages, strict=True):
        np.testing.assert_allclose(got, np.where(sample.loss_mask > 0, other - own, 0.0), atol=1e-6)
    assert all(torch.equal(kept[n], t) for n, t in _weights(backend).items()), "the student's weights came back"
    given = with_samples(
        batch, [dataclasses.replace(s, teacher_log_probs=x) for s, x in zip(batch.samples, judged, strict=True)]
    )
    by_sample = make_backend(tiny_qwen3, use_opd=True, opd_type="sglang")
    again = by_sample.with_advantages(given).aims.advantages
    for a, b in zip(prepared.aims.advantages, again, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    with pytest.raises(DataError, match="teacher_log_probs"):
        by_sample.train(batch)


@pytest.mark.slow
def test_kl_in_the_reward_acts(tiny_qwen3: Path, tmp_path: Path, make_backend: Make) -> None:
    reference = write_tiny_model(tmp_path / "reference", "qwen3", tied=False, seed=5)
    batch = random_batch(seed=6)
    for estimator in ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"):
        settings: dict[str, Any] = {"advantage_estimator": estimator, "ref_load": str(reference), "kl_loss_type": "k1"}
        settings["initial_weights"] = str(tiny_qwen3)  # else training begins with the reference
        backend = make_backend(tiny_qwen3, kl_coef=0.5, **settings)
        prepared = backend.with_advantages(batch)
        advantages, metrics = prepared.aims.advantages, prepared.aims.metrics
        backend.args = backend.args.replace(kl_coef=0.0)
        plain = backend.with_advantages(batch).aims.advantages
        assert metrics["train/kl_in_reward"] != 0.0
        assert any(not np.allclose(a, b) for a, b in zip(advantages, plain, strict=True)), estimator


def test_log_probs_are_those_of_the_top_p_set(tiny_qwen3: Path, make_backend: Make) -> None:
    batch = random_batch(seed=6)
    whole = make_backend(tiny_qwen3).log_probs(batch)
    settings: dict[str, Any] = {"rollout_top_p": 0.9, "rollout_top_k": 100, "use_tis": True, "global_batch_size": 4}
    backend = make_backend(tiny_qwen3, **settings)
    cut, full = backend.forward(backend._prepare(batch))
    for a, b, c in zip(cut, full, whole, strict=True):
        np.testing.assert_allclose(b, c, atol=1e-6)
        assert (a > b + 0.05).all(), "mass was cut off, so what is left is likelier"
    on_policy = with_samples(
        batch, [dataclasses.replace(s, rollout_log_probs=x) for s, x in zip(batch.samples, full, strict=True)]
    )
    backend.args = backend.args.replace(mismatch_limit=1e-5)
    metrics = backend.train(on_policy)
    assert metrics["train/tis"] == pytest.approx(1.0, abs=1e-4), (
        "both sides of the weight are of the whole distribution"
    )
    assert 0.0 < metrics["train/top_p_outside"] < 1.0, "random tokens: some would never have been sampled"


HOOKS = """
def own_advantages(args, rollout_data):
    assert rollout_data["values"] is None and len(rollout_data["log_probs"]) == len(rollout_data["rewards"])
    rollout_data["advantages"] = [m * r for m, r in zip(rollout_data["loss_masks"], rollout_data["rewards"])]

def wrong_advantages(args, rollout_data):
    rollout_data["advantages"] = [m[:1] for m in rollout_data["loss_masks"]]

def own_returns(args, rollout_data):
    columns = (rollout_data[name] for name in ("token_rewards", "raw_reward", "metadata"))
    rollout_data["advantages"] = [(r.flip(0).cumsum(0).flip(0) + end) * own["scale"] for r, end, own in zip(*columns)]

def own_loss(args, batch, log_probs, sum_of_sample_mean):
    loss = sum_of_sample_mean(-batch["advantages"] * log_probs)
    return loss, {"mine": loss.detach()}

def constant_loss(args, batch, log_probs, sum_of_sample_mean):
    return log_probs.detach().sum(), {}

def own_tis(args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths):
    import torch
    weight = torch.cat([(t - r).exp().clamp(0.0, 2.0) for t, r in zip(train_log_probs, rollout_log_probs)])
    return pg_loss * weight, loss_masks, {"own_tis": weight}

def own_reducer(total_lengths, response_lengths, masks, calculate_per_token_loss):
    import torch
    mask = torch.cat(masks)
    return lambda x: (x * mask).sum() / 100.0
"""


def _all_trained(sample: TrainSample) -> TrainSample:
    ones = np.ones_like(sample.loss_mask)
    return dataclasses.replace(sample, loss_mask=ones, token_versions=ones.astype(np.int32))


@pytest.mark.slow
def test_rewards_of_tokens_and_metadata_reach_the_trainer(tiny_qwen3: Path, tmp_path: Path, make_backend: Make) -> None:
    """The gradient of REINFORCE++ is that of a user's function, which sums the rewards that follow each token."""
    file = tmp_path / "mine.py"
    file.write_text(HOOKS)
    rng, batch = np.random.default_rng(4), random_batch(seed=2)
    rewarded = [
        dataclasses.replace(_all_trained(s), token_rewards=rng.normal(size=s.response_length), metadata={"scale": 2.0})
        for s in batch.samples
    ]
    batch = with_samples(batch, rewarded)
    settings: dict[str, Any] = {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": False}
    by_hand = make_backend(tiny_qwen3, custom_advantage_function_path=f"{file}:own_returns", **settings)
    got, want = dict(by_hand.gradients(batch)), dict(make_backend(tiny_qwen3, **settings).gradients(batch))
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], 2.0 * gradient, rtol=1e-4, atol=1e-6 * float(gradient.abs().max()))


@pytest.mark.slow
def test_functions_of_the_user(tiny_qwen3: Path, tmp_path: Path, make_backend: Make) -> None:
    file = tmp_path / "mine.py"
    file.write_text(HOOKS)
    batch = random_batch(seed=2)
    batch = with_samples(batch, [_all_trained(s) for s in batch.samples])

    def gradients(**settings: Any) -> dict[str, torch.Tensor]:
        return dict(make_backend(tiny_qwen3, **settings).gradients(batch))

    def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
        for name, want in b.items():
            torch.testing.assert_close(a[name], want, rtol=1e-4, atol=1e-6 * float(want.abs().max()))

    advantages = f"{file}:own_advantages"
    raw = gradients(rewards_normalization=False)
    same(gradients(custom_advantage_function_path=advantages, rewards_normalization=False), raw)
    same(gradients(custom_advantage_function_path=advantages), gradients())
    # On policy the clipped loss has the gradient of -A log p.
    custom = {"loss_type": "custom_loss", "custom_loss_function_path": f"{file}:own_loss"}
    same(gradients(rewards_normalization=False, **custom), raw)
    same(gradients(use_tis=True, custom_tis_function_path=f"{file}:own_tis"), gradients(use_tis=True))
    summed = gradients(loss_aggregation="constant_length", loss_constant_length=100)
    same(gradients(custom_pg_loss_reducer_function_path=f"{file}:own_reducer"), summed)
    with pytest.raises(HookError, match="one value per response"):
        gradients(custom_advantage_function_path=f"{file}:wrong_advantages")
    with pytest.raises(HookError, match="has no gradient"):
        gradients(loss_type="custom_loss", custom_loss_function_path=f"{file}:constant_loss")
    metrics = make_backend(tiny_qwen3, **custom).train(batch)
    assert metrics["train/mine"] == pytest.approx(metrics["train/loss"])


SLOW_AGGREGATIONS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("sequence_sum", "constant_length")]


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", *SLOW_AGGREGATIONS])
def test_means_are_means_however_losses_add(aggregation: str, tiny_qwen3: Path, make_backend: Make) -> None:
    """On policy the ratio is 1 at every token, and so is its mean; the loss alone knows of the aggregation."""
    batch = random_batch(seed=2)
    masks = [np.zeros_like(s.loss_mask) if i == 3 else s.loss_mask for i, s in enumerate(batch.samples)]
    batch = with_samples(
        batch, [dataclasses.replace(s, loss_mask=m) for s, m in zip(batch.samples, masks, strict=True)]
    )
    backend = make_backend(tiny_qwen3, loss_aggregation=aggregation, use_tis=True)
    own = backend.log_probs(batch)
    batch = with_samples(
        batch, [dataclasses.replace(s, rollout_log_probs=x) for s, x in zip(batch.samples, own, strict=True)]
    )
    metrics = backend.train(batch)
    trained = np.concatenate([x[m > 0] for x, m in zip(own, masks, strict=True)])
    assert metrics["train/ois"] == metrics["train/tis"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["train/log_probs"] == pytest.approx(float(trained.mean()), abs=1e-5)


def test_a_trained_token_that_no_engine_sampled_is_no_old_policy(tiny_qwen3: Path, make_backend: Make) -> None:
    batch = random_batch(seed=2)
    versions = batch.samples[1].token_versions.copy()
    versions[0] = -1
    samples = list(batch.samples)
    samples[1] = dataclasses.replace(samples[1], token_versions=versions)
    with pytest.raises(DataError, match="sample 1 has trained tokens without rollout log-probs"):
        make_backend(tiny_qwen3, use_rollout_logprobs=True).train(with_samples(batch, samples))


def test_a_non_finite_sample_is_named_and_kept(tiny_qwen3: Path, tmp_path: Path, make_backend: Make) -> None:
    """A clamp would hide an infinite log-prob from the loss; the error names the sample and where it is kept."""
    batch = random_batch(seed=2)
    victim = batch.samples[5]
    assert victim.rollout_log_probs is not None
    values = victim.rollout_log_probs.copy()
    values[0] = -np.inf
    samples = list(batch.samples)
    samples[5] = dataclasses.replace(victim, rollout_log_probs=values)
    backend = make_backend(tiny_qwen3, use_rollout_logprobs=True, run_dir=str(tmp_path), mismatch_limit=1e30)
    before = _weights(backend)
    with pytest.raises(NumericsError, match=r"sample 5 of group 2 from response token 0") as error:
        backend.train(with_samples(batch, samples))
    folder = tmp_path / "non_finite" / "step_0_rank_0"
    assert str(folder) in str(error.value)
    record = json.loads((folder / "samples.json").read_text())
    assert "5" in json.dumps(record) and (folder / "tensors.safetensors").is_file()
    assert all(torch.equal(before[n], t) for n, t in _weights(backend).items())
