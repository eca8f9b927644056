"""Memory and waits on a GPU: sleep and wake bit for bit, one pinned arena, micro-batches that nothing waits for.

python -m pytest tests/gpu/test_memory_on_gpu.py
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.tiny import write_tiny_model
from tests.support.training import free_port, random_batch, training_args

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GPU = torch.device("cuda", 0)
WIDE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16}
"""Some hundred megabytes of weights: little enough to build fast, large beside what a CUDA context keeps."""


def backend_of(checkpoint: Path, **settings: Any) -> Any:
    from tests.support.measured_backend import MeasuredBackend

    args = dataclasses.replace(training_args(checkpoint, device="cuda", **settings), sglang={"dtype": "bfloat16"})
    return MeasuredBackend(
        args, rank=0, world_size=1, local_rank=0, master_address="127.0.0.1", master_port=free_port()
    )


@pytest.fixture
def before() -> tuple[int, int]:
    """Bytes allocated and reserved that earlier tests of this process left on the GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


@pytest.fixture
def wide(tmp_path: Path) -> Iterator[Any]:
    """A trained bf16 backend that lends its GPU."""
    checkpoint = write_tiny_model(tmp_path / "model", "qwen3", tied=False, head_dim=64, **WIDE)
    backend = backend_of(checkpoint, megatron={"bf16": True}, colocate=True, offload_train=True)
    backend.train(random_batch())
    yield backend
    backend.close()


def everything(backend: Any) -> list[Tensor]:
    parts = backend._parts()
    return [*parts.weights, *parts.others]


def test_sleeping_changes_no_bit_and_frees_what_was_there(before: tuple[int, int], wide: Any) -> None:
    """Law: at least 95 % of the memory is given back, in two turns; waking restores every bit and zeroes gradients."""
    allocated_before, reserved_before = before
    all_before = [t.detach().cpu().clone() for t in everything(wide)]
    torch.cuda.synchronize()
    held = torch.cuda.memory_reserved() - reserved_before
    weights = sum(t.numel() * t.element_size() for t in wide._parts().weights)
    told = wide.keep_weights()
    assert told["perf/memory_train_bytes"] >= told["perf/memory_train_predicted_bytes"] > weights
    allocated = torch.cuda.memory_allocated() - allocated_before
    assert allocated < 1.1 * weights + 64e6, "nothing but the weights is left"
    assert sum(t.numel() for _, t in wide.iter_hf_tensors()) > 0, "weights can be sent"
    told = wide.sleep()
    assert told["perf/memory_sync_bytes"] < told["perf/memory_sync_predicted_bytes"] + 64e6
    assert torch.cuda.memory_reserved() - reserved_before < 0.05 * held, "at least 95 % is given back"
    wide.wake()
    for now, then in zip(everything(wide), all_before, strict=True):
        assert torch.equal(now.detach().cpu().reshape(-1).view(torch.uint8), then.reshape(-1).view(torch.uint8))
    assert all(not gradient.any() for gradient in wide._parts().gradients)


def test_training_goes_on_after_a_sleep_as_if_there_had_been_none(tmp_path: Path) -> None:
    checkpoint = write_tiny_model(tmp_path / "model", "qwen3", tied=False, head_dim=64)
    found = []
    for sleeps in (False, True):
        backend = backend_of(checkpoint, megatron={"bf16": True})
        for seed in range(3):
            metrics = backend.train(random_batch(seed=seed))
            if sleeps:
                backend.sleep()
                backend.wake()
        found.append((metrics["train/grad_norm"], [t.detach().cpu().clone() for t in backend._parts().weights]))
        backend.close()
    (norm, weights), (other_norm, other_weights) = found
    assert norm == pytest.approx(other_norm, rel=1e-2)
    assert all(torch.allclose(a, b, atol=1e-2) for a, b in zip(weights, other_weights, strict=True))


def test_the_first_sleep_is_not_slowed_down_by_pinning(wide: Any) -> None:
    """Law: once the arena is there, the first sleep takes at most twice as long as a later one; all of it is pinned."""
    stash = wide._sleeper._prepare()
    begin = wide._sleeper._arena.mark()
    assert wide._sleeper._arena.take(1).is_pinned(), "waits until the arena is there"
    wide._sleeper._arena.rewind(begin)
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        wide.sleep()
        seconds.append(time.perf_counter() - began_s)
        assert all(
            host.is_pinned() for _, away in stash._kept for *_, host in away if host is not None and host.numel()
        )
        wide.wake()
    planned = wide._parts().arena_bytes(GPU)
    assert wide._sleeper._arena.num_bytes <= 1.05 * planned, "no more room was needed than planned"
    assert seconds[0] <= 2 * max(seconds[1:]) + 0.05, seconds


def leaves(value: Any, name: str = "") -> dict[str, Any]:
    """Every leaf of nested records."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [leaves(getattr(value, f.name), f"{name}.{f.name}") for f in dataclasses.fields(value)]
        return {key: leaf for part in parts for key, leaf in part.items()}
    return {name: value}


def prepared_of(num_groups: int = 16) -> Any:
    from slime.algorithms import Algorithm
    from slime.training.step.micro_batch import prepare

    args = training_args(Path("model"), micro_batch_size=2)
    return prepare(random_batch(num_groups), args, Algorithm.of(args), dp_size=1, one_step=True)


def staged(prepared: Any) -> tuple[Any, list[Any]]:
    """The iterator of all micro-batches, one ahead, and their positions."""
    from slime.training.step.micro_batch import to_device
    from slime.training.step.staging import Staging

    positions = [*prepared.schedule.steps[0].micro_batches[0], ()]
    builds = [lambda put, p=p: to_device(prepared, p, GPU, pad_to_multiple=8, put=put) for p in positions]
    return Staging(GPU).one_ahead(builds), positions


def test_staged_micro_batches_are_those_that_go_array_by_array() -> None:
    """Law: every field is equal, read while later ones are already under way in the same two buffers."""
    from slime.training.step.micro_batch import to_device

    prepared = prepared_of()
    batches, positions = staged(prepared)
    kept = list(batches)
    for batch, own in zip(kept, positions, strict=True):
        ours, theirs = leaves(batch), leaves(to_device(prepared, own, GPU, pad_to_multiple=8))
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if isinstance(value, Tensor):
                assert ours[name].device == value.device and ours[name].dtype == value.dtype, name
                assert torch.equal(ours[name], value), name
            else:
                assert ours[name] == value, name


def test_taking_a_micro_batch_waits_for_nothing() -> None:
    """Law: after the buffers have grown, no call in packing and copying makes the host wait for the device."""
    prepared = prepared_of()
    for _ in staged(prepared)[0]:  # kernels are loaded
        pass
    batches, positions = staged(prepared)
    first, second = next(batches), next(batches)
    busy = torch.ones(4096, 4096, device=GPU)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        num_tokens = [first.tokens.numel(), second.tokens.numel()]
        for batch in batches:
            busy = busy @ busy
            num_tokens.append(batch.tokens.numel())
            batch.mask.sum()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(num_tokens) == len(positions)


def test_collecting_mismatch_and_suspects_waits_for_nothing_before_the_end() -> None:
    from slime.training.step.mismatch import MismatchMeter
    from slime.training.step.non_finite import Suspects

    batches = list(staged(prepared_of(4))[0])
    meter, suspects = MismatchMeter(1, GPU), Suspects()
    scores = [b.rollout_log_probs + 0.01 for b in batches]
    losses = [torch.zeros_like(s) for s in scores]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch, score, loss in zip(batches, scores, losses, strict=True):
            meter.add(batch, score)
            suspects.add(batch, score, loss)
        flag = suspects.any_found()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert flag is not None and not bool(flag)


WORDS = (1, 16, 17, 8191, 8192, 8193, 100_003, 5 * 8192)


def test_the_digest_is_the_engine_s_in_parts_too_and_warm_when_it_was_warmed() -> None:
    """Law: our own kernel gives the engine's digest, and one form of it is all there is to compile."""
    mm_utils = pytest.importorskip("sglang.srt.managers.mm_utils")
    from slime.serving.payloads import digest, warm_digest

    warm_digest(GPU)
    for num_bytes in (*(4 * words for words in WORDS), 4 * 8192 + 2, 7):
        tensor = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=GPU)
        began_s = time.perf_counter()
        found = digest(tensor)
        assert time.perf_counter() - began_s < 0.2, f"{num_bytes} bytes: compiled again"
        assert found == f"{mm_utils.tensor_hash(tensor):016x}"
        hasher = digest.begin()
        for part in tensor.tensor_split((num_bytes // 3, num_bytes // 2)):
            hasher.add([part])
            digest.read([hasher])
        assert hasher.finish() == found
