"""What is collected over micro-batches and fetched once: the worst token, and numbers that are not finite."""

from __future__ import annotations

import dataclasses
import gc
import math
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from slime.algorithms import Algorithm
from slime.core.errors import NumericsError
from slime.training.step.micro_batch import MicroBatch, PreparedBatch, prepare, to_device
from slime.training.step.mismatch import MismatchMeter
from slime.training.step.non_finite import KEPT_BYTES_PER_TOKEN, Suspects
from tests.support.training import random_batch, training_args

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    """A process group of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def micro_batches(seed: int, size: int) -> tuple[PreparedBatch, list[MicroBatch]]:
    args = training_args(Path("model"), micro_batch_size=size)
    prepared = prepare(random_batch(seed=seed), args, Algorithm.of(args), dp_size=1)
    return prepared, [to_device(prepared, p, CPU) for p in (*prepared.schedule.steps[0].micro_batches[0], ())]


def tensors_of(batch: MicroBatch) -> list[torch.Tensor]:
    values = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    return [value for value in values if isinstance(value, torch.Tensor)]


@given(seed=st.integers(0, 10_000), size=st.integers(1, 5), nan=st.booleans())
def test_the_worst_token_of_all_micro_batches_is_named_with_its_numbers(
    alone: Any, seed: int, size: int, nan: bool
) -> None:
    """Law: it is the first of the largest differences among tokens of the current version; a NaN is the largest."""
    prepared, batches = micro_batches(seed, size)
    generator = torch.Generator().manual_seed(seed)
    meter, found = MismatchMeter(1, CPU), []
    for number, batch in enumerate(batches):
        own = batch.rollout_log_probs + torch.randn(batch.mask.shape, generator=generator) * 0.1
        if nan and number == len(batches) // 2 and (own_current := torch.nonzero(batch.mask > 0)).numel():
            own[own_current[-1]] = math.nan
        meter.add(batch, own)
        ends = np.cumsum(batch.lengths)
        for index in range(own.numel()):
            which = int(np.searchsorted(ends, index, side="right"))
            sample = prepared.batch.samples[batch.positions[which]]
            offset = index - int(ends[which]) + batch.lengths[which]
            if sample.loss_mask[offset] > 0 and sample.token_versions[offset] == 1:
                engine = np.float32(sample.rollout_log_probs[offset])
                found.append((abs(np.float32(own[index]) - engine), sample, offset, float(own[index]), float(engine)))
    worst = max(found, key=lambda f: math.inf if math.isnan(f[0]) else f[0])
    with pytest.raises(NumericsError) as caught:
        meter.finish(prepared.batch, dtype=torch.float32, limit=-1.0, group=alone)
    _, sample, offset, trainer, engine = worst
    named = f"sample {sample.index} of group {sample.group_index}, response token {offset} "
    assert named in str(caught.value) and f"trainer {trainer:.6f}, engine {engine:.6f}" in str(caught.value)
    metrics = meter.finish(prepared.batch, dtype=torch.float32, limit=math.inf, group=alone) if not nan else {}
    if metrics:
        assert metrics["train/train_rollout_logprob_abs_diff_max"] == float(worst[0])
        mean = math.fsum(float(f[0]) for f in found) / len(found)
        assert metrics["train/train_rollout_logprob_abs_diff_current"] == pytest.approx(mean, rel=1e-12)


@given(seed=st.integers(0, 10_000), size=st.integers(1, 5), data=st.data())
def test_what_is_not_finite_at_a_trained_token_is_found_and_nothing_else(
    seed: int, size: int, data: st.DataObject
) -> None:
    prepared, batches = micro_batches(seed, size)
    suspects, bad = Suspects(), {}
    for batch in batches:
        scores = batch.rollout_log_probs.clone()
        for index in data.draw(st.lists(st.integers(0, max(scores.numel() - 1, 0)), max_size=2, unique=True)):
            if index < scores.numel():
                scores[index] = math.inf
        suspects.add(batch, scores, torch.zeros_like(scores))
        for position, part in zip(batch.positions, scores.split(batch.lengths), strict=True):
            trained = prepared.batch.samples[position].loss_mask > 0
            if (offsets := np.flatnonzero(~np.isfinite(part.numpy()) & trained)).size:
                bad[position] = offsets.tolist()
    flag = suspects.any_found()
    assert flag is not None and bool(flag) == bool(bad) and suspects.offsets() == bad
    assert Suspects().any_found() is None and Suspects().offsets() == {}


def test_nothing_of_a_micro_batch_is_kept_but_scores_and_masks(alone: Any) -> None:
    """Law: memory of a step does not grow with the tensors of its micro-batches."""
    _, batches = micro_batches(0, 2)
    suspects, meter = Suspects(), MismatchMeter(1, CPU)
    before = [weakref.ref(tensor) for batch in batches for tensor in tensors_of(batch)]
    for batch in batches:
        scores = batch.rollout_log_probs.clone()
        suspects.add(batch, scores, torch.zeros_like(scores))
        meter.add(batch, scores)
    del batch, batches, scores
    gc.collect()
    assert not [ref() for ref in before if ref() is not None]
    kept = [tensor for _, bad, scores in suspects._seen for tensor in (bad, scores)]
    num_tokens = sum(scores.numel() for _, _, scores in suspects._seen)
    assert sum(tensor.numel() * tensor.element_size() for tensor in kept) == KEPT_BYTES_PER_TOKEN * num_tokens
