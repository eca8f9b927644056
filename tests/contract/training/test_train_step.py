"""One rank: masked values cannot matter, the gap alarm, non-finite numbers, resume, reference model."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime.core.batch import TrainBatch, TrainSample
from slime.core.errors import CheckpointError, ConfigError, DataError, NumericsError
from tests.support.marks import quick
from tests.support.training import listening_addresses, random_batch, with_samples


def _change(batch: TrainBatch, index: int, **changes: Any) -> TrainBatch:
    samples = list(batch.samples)
    samples[index] = dataclasses.replace(samples[index], **changes)
    return with_samples(batch, samples)


def _weights(backend: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.iter_hf_tensors()}


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def _on_policy(backend: Any, batch: TrainBatch) -> TrainBatch:
    own = backend.log_probs(batch)
    return with_samples(
        batch, [dataclasses.replace(s, rollout_log_probs=x) for s, x in zip(batch.samples, own, strict=True)]
    )


NAN = float("nan")


@pytest.mark.parametrize("poison", quick([NAN, 1e6, float("-inf")], NAN))
def test_masked_values_change_no_bit(poison: float, tiny_qwen3: Path, make_backend: Callable[..., Any]) -> None:
    settings: dict[str, Any] = {
        "use_tis": True,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "entropy_coef": 0.01,
        "eps_clip_c": 3.0,
        "global_batch_size": 4,
    }
    batch = random_batch(seed=1)
    assert any((s.loss_mask == 0).any() for s in batch.samples)

    def poisoned(sample: TrainSample) -> TrainSample:
        assert sample.rollout_log_probs is not None
        values = np.where(sample.loss_mask > 0, sample.rollout_log_probs, np.float32(poison))
        return dataclasses.replace(sample, rollout_log_probs=values)

    clean_backend = make_backend(tiny_qwen3, **settings)
    clean_metrics, clean = clean_backend.train(batch), _weights(clean_backend)
    backend = make_backend(tiny_qwen3, **settings)
    assert backend.train(with_samples(batch, [poisoned(s) for s in batch.samples])) == clean_metrics
    assert _same(_weights(backend), clean)


def test_resume_equals_not_stopping(tiny_qwen3: Path, tmp_path: Path, make_backend: Callable[..., Any]) -> None:
    megatron = {"lr_decay_style": "cosine", "lr_decay_iters": 10, "lr_warmup_iters": 2, "lr_warmup_init": 1e-5}
    batches = [random_batch(seed=s) for s in range(4)]
    whole = make_backend(tiny_qwen3, megatron=megatron)
    metrics = [whole.train(b) for b in batches[:2]]
    whole.weight_version = 17
    whole.save(tmp_path / "mid")
    metrics += [whole.train(b) for b in batches[2:]]
    whole.save(tmp_path / "end")

    resumed = make_backend(tiny_qwen3, megatron=megatron)
    resumed.load(tmp_path / "mid")
    assert resumed.weight_version == 17
    assert [resumed.train(b) for b in batches[2:]] == metrics[2:]
    resumed.save(tmp_path / "again")
    for file in (tmp_path / "end").glob("rank_*"):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name
    assert len({m["train/lr-pg_0"] for m in metrics}) == 4


def test_settings_of_the_optimizer_are_this_runs_and_not_the_checkpoints(
    tiny_qwen3: Path, tmp_path: Path, make_backend: Callable[..., Any]
) -> None:
    first = make_backend(tiny_qwen3, megatron={"lr": 1e-3})
    first.train(random_batch())
    first.save(tmp_path / "mid")
    changed = {"lr": 4e-4, "adam_beta2": 0.9, "start_weight_decay": 0.02, "end_weight_decay": 0.02}
    resumed = make_backend(tiny_qwen3, megatron={**changed, "lr_decay_style": "linear", "lr_decay_iters": 4})
    resumed.load(tmp_path / "mid")
    groups = resumed._trainable.inner[0].optimizer.param_groups
    assert [g["weight_decay"] for g in groups] == [0.02, 0.0] and all(g["betas"] == (0.9, 0.9) for g in groups)
    assert resumed.train(random_batch())["train/lr-pg_0"] == pytest.approx(3e-4), "second step of its own schedule"


def test_a_checkpoint_without_optimizer_resumes_only_when_told_so(
    tiny_qwen3: Path, tmp_path: Path, make_backend: Callable[..., Any]
) -> None:
    first = make_backend(tiny_qwen3, no_save_optim=True)
    first.train(random_batch())
    first.save(tmp_path / "mid")
    trained = _weights(first)
    backend = make_backend(tiny_qwen3)
    before = _weights(backend)
    with pytest.raises(CheckpointError, match="--no-load-optim"):
        backend.load(tmp_path / "mid")
    assert _same(_weights(backend), before)
    for flag in ("no_load_optim", "finetune"):
        told = make_backend(tiny_qwen3, **{flag: True})
        told.load(tmp_path / "mid")
        assert _same(_weights(told), trained)


def test_draws_of_a_library_do_not_reach_the_checkpoint(
    tiny_qwen3: Path, tmp_path: Path, make_backend: Callable[..., Any]
) -> None:
    backend = make_backend(tiny_qwen3)
    backend.save(tmp_path / "a")
    random.random()
    backend.save(tmp_path / "b")
    for file in (tmp_path / "a").glob("rank_*"):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


def test_an_export_replaces_exports_and_nothing_else(
    tiny_qwen3: Path, tmp_path: Path, make_backend: Callable[..., Any]
) -> None:
    backend = make_backend(tiny_qwen3)
    for _ in range(2):
        backend.save_hf(tmp_path / "export")
    before = _weights(backend)
    again = make_backend(tmp_path / "export")
    assert _same(_weights(again), before)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_text("years")
    with pytest.raises(CheckpointError, match=r"work.*not exported by slime"):
        again.save_hf(tmp_path / "work")
    assert [p.name for p in tmp_path.iterdir() if "work" in p.name] == ["work"]
    assert (tmp_path / "work" / "thesis.tex").read_text() == "years"


def test_a_batch_of_any_size_can_be_measured(tiny_qwen3: Path, make_backend: Callable[..., Any]) -> None:
    backend = make_backend(tiny_qwen3, mismatch_limit=None, global_batch_size=6)
    batch = _on_policy(backend, random_batch())  # 8 executions
    assert backend.measure_mismatch(batch)["train/train_rollout_logprob_abs_diff_max"] < 1e-5
    with pytest.raises(ConfigError, match="8 executions"):
        backend.train(batch)


def test_ranks_meet_on_loopback_only(tiny_qwen3: Path, make_backend: Callable[..., Any]) -> None:
    make_backend(tiny_qwen3)
    assert listening_addresses(os.getpid()) == {"127.0.0.1"}


FLOAT16 = {"fp16": True, "initial_loss_scale": 1024.0}


@pytest.mark.parametrize("flags", [{"bf16": True}, pytest.param(FLOAT16, marks=pytest.mark.slow)])
def test_half_precision_trains_and_resumes(
    flags: dict[str, Any], tiny_qwen3: Path, tmp_path: Path, make_backend: Callable[..., Any]
) -> None:
    first = make_backend(tiny_qwen3, megatron=flags)
    before = _weights(first)
    assert np.isfinite(first.train(random_batch())["train/loss"])
    assert not _same(before, _weights(first))
    first.save(tmp_path / "mid")
    want = first.train(random_batch(seed=5))
    second = make_backend(tiny_qwen3, megatron=flags)
    second.load(tmp_path / "mid")
    assert second.train(random_batch(seed=5)) == want
    assert _same(_weights(first), _weights(second))


def test_same_state_and_batch_give_the_same_bits(tiny_llama: Path, make_backend: Callable[..., Any]) -> None:
    results = []
    for _ in range(2):
        backend = make_backend(tiny_llama, global_batch_size=4)
        results.append((backend.train(random_batch()), _weights(backend)))
    assert results[0][0] == results[1][0]
    assert _same(results[0][1], results[1][1])


def test_the_mismatch_alarm_names_the_token_and_spares_the_weights(
    tiny_qwen3: Path, make_backend: Callable[..., Any]
) -> None:
    for steps in (8, 4):  # one optimizer step, and two
        backend = make_backend(tiny_qwen3, mismatch_limit=None, global_batch_size=steps)
        batch = _on_policy(backend, random_batch())
        wrong = np.array(batch.samples[5].rollout_log_probs)
        wrong[0] -= 0.5
        before = _weights(backend)
        with pytest.raises(NumericsError, match=r"mismatch of 0\.5.*sample 5 of group 2.*response token 0 "):
            backend.train(_change(batch, 5, rollout_log_probs=wrong))
        assert _same(_weights(backend), before)
        metrics = backend.train(batch)
        assert metrics["train/train_rollout_logprob_abs_diff_max"] < 1e-5
        assert metrics["train/stale_tokens"] == 0


def test_stale_tokens_are_counted_and_not_limited(tiny_qwen3: Path, make_backend: Callable[..., Any]) -> None:
    backend = make_backend(tiny_qwen3, mismatch_limit=None)
    batch = _on_policy(backend, random_batch())
    old = batch.samples[2]
    assert old.rollout_log_probs is not None
    stale = _change(
        batch,
        2,
        rollout_log_probs=old.rollout_log_probs + 1.0,
        token_versions=np.where(old.token_versions == 1, 0, old.token_versions).astype(np.int32),
    )
    metrics = backend.train(stale)
    assert metrics["train/stale_tokens"] == (old.loss_mask > 0).sum()
    assert metrics["train/train_rollout_logprob_abs_diff_stale"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["train/train_rollout_logprob_abs_diff_max"] < 1e-5


def test_a_non_finite_value_names_the_sample_and_spares_the_weights(
    tiny_qwen3: Path, make_backend: Callable[..., Any]
) -> None:
    backend = make_backend(tiny_qwen3, use_rollout_logprobs=True)
    before = _weights(backend)
    batch = random_batch()
    broken = np.array(batch.samples[3].rollout_log_probs)
    broken[0] = np.nan
    with pytest.raises(NumericsError, match="in 1 samples: sample 3 of group 1 from response token 0"):
        backend.train(_change(batch, 3, rollout_log_probs=broken))
    with pytest.raises(DataError, match="the reward of sample 3 in group 1 must be finite, got inf"):
        backend.train(_change(batch, 3, reward=float("inf")))
    assert _same(_weights(backend), before)


def test_the_kl_loss_measures_the_distance_to_the_first_weights(
    tiny_qwen3: Path, make_backend: Callable[..., Any]
) -> None:
    backend = make_backend(tiny_qwen3, use_kl_loss=True, kl_loss_coef=0.0)
    first, second = backend.train(random_batch()), backend.train(random_batch())
    assert first["train/kl_loss"] == 0.0
    assert second["train/kl_loss"] > 0.0


@pytest.mark.parametrize("nothing", ["unscored", "masked"])
def test_what_trains_no_token_changes_nothing(
    nothing: str, tiny_qwen3: Path, tmp_path: Path, make_backend: Callable[..., Any]
) -> None:
    """Law: without a trained token no update runs, so neither weight decay nor momentum moves the weights."""

    def untrained(sample: TrainSample) -> TrainSample:
        changes: dict[str, Any] = {"reward": NAN} if nothing == "unscored" else {"loss_mask": sample.loss_mask * 0}
        return dataclasses.replace(sample, **changes)

    batch = random_batch(seed=1)
    empty = with_samples(batch, [untrained(sample) for sample in batch.samples])
    half = with_samples(batch, [untrained(s) if s.index < 4 else s for s in batch.samples])
    backend = make_backend(tiny_qwen3, global_batch_size=4, megatron={"weight_decay": 0.5, "lr": 1e-2})
    assert backend.train(batch)["train/num_updates"] == 2.0, "momentum is left"
    before = _weights(backend)
    backend.save(tmp_path / "before")
    assert backend.train(empty) == {"train/num_updates": 0.0} and _same(_weights(backend), before)
    backend.save(tmp_path / "after")
    for file in (tmp_path / "before").glob("rank_*"):
        assert file.read_bytes() == (tmp_path / "after" / file.name).read_bytes(), file.name
    assert backend.tflops(empty, 1e-6) == 0.0 < backend.tflops(half, 1e-6)
    assert backend.train(half)["train/num_updates"] == 1.0 and not _same(_weights(backend), before)


def test_equal_rewards_leave_no_gradient(tiny_qwen3: Path, make_backend: Callable[..., Any]) -> None:
    backend = make_backend(tiny_qwen3)
    batch = random_batch()
    same = with_samples(batch, [dataclasses.replace(s, reward=0.3) for s in batch.samples])
    metrics = backend.train(same)
    assert metrics["train/pg_loss"] == 0.0
    assert metrics["train/grad_norm"] == 0.0


def test_supervised_training_learns(tiny_llama: Path, make_backend: Callable[..., Any]) -> None:
    backend = make_backend(tiny_llama, loss_type="sft_loss")
    plain = [dataclasses.replace(s, rollout_log_probs=None) for s in random_batch().samples]
    batch = with_samples(random_batch(), plain)
    losses = [backend.train(batch)["train/loss"] for _ in range(15)]
    assert losses[-1] < 0.9 * losses[0]


def test_settings_that_cannot_work_are_refused(tiny_qwen3: Path, make_backend: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="--pipeline-model-parallel-size 2"):
        make_backend(tiny_qwen3, megatron={"pipeline_model_parallel_size": 2})
    with pytest.raises(ConfigError, match="lr-decay-iters"):
        make_backend(tiny_qwen3, megatron={"lr_decay_style": "linear"})
    backend = make_backend(tiny_qwen3, use_tis=True)
    with pytest.raises(DataError, match="without rollout log-probs"):
        backend.train(_change(random_batch(), 0, rollout_log_probs=None))


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        pytest.param(
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, marks=pytest.mark.slow
        ),
    ],
    ids=["full", "selective"],
)
def test_recomputation_changes_no_bit(
    recompute: dict[str, Any], tiny_qwen3: Path, make_backend: Callable[..., Any]
) -> None:
    want = make_backend(tiny_qwen3).gradients(random_batch())
    got = make_backend(tiny_qwen3, megatron=recompute).gradients(random_batch())
    assert _same(want, got)


def test_the_gap_leaves_out_what_old_keys_and_values_sampled(
    tiny_qwen3: Path, make_backend: Callable[..., Any]
) -> None:
    """A request that went on with them differs legitimately, from its first token of newer weights on."""
    for mode, tolerated in (("retract", False), ("in_place", True)):
        backend = make_backend(tiny_qwen3, mismatch_limit=None, global_batch_size=8, pause_generation_mode=mode)
        backend.weight_version = 2
        own = _on_policy(backend, random_batch())
        batch = with_samples(own, [_sampled_by(s, 2) for s in own.samples])
        log_probs, mask = batch.samples[5].rollout_log_probs, batch.samples[5].loss_mask
        assert log_probs is not None and mask[1:].any(), "the sample needs a token after its first"
        versions = _sampled_by(batch.samples[5], 2, first=1).token_versions
        mixed = _change(batch, 5, token_versions=versions, rollout_log_probs=log_probs - 0.5)
        if tolerated:
            metrics = backend.measure_mismatch(mixed)
            assert (
                metrics["train/train_rollout_logprob_abs_diff_max"] < 1e-5
                and metrics["train/stale_tokens"] == mask.sum()
            )
            other = np.array(batch.samples[0].rollout_log_probs) - 0.5
            mixed = _change(mixed, 0, rollout_log_probs=other)  # of one version: as sharp as ever
        with pytest.raises(NumericsError, match=f"sample {0 if tolerated else 5} of group"):
            backend.measure_mismatch(mixed)


def _sampled_by(sample: TrainSample, version: int, *, first: int | None = None) -> TrainSample:
    """Its tokens sampled by `version`, the first one by `first` if given."""
    versions = np.where(sample.token_versions > 0, version, -1).astype(np.int32)
    if first is not None:
        versions[0] = first
    return dataclasses.replace(sample, token_versions=versions)
