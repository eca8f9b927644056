"""Trainer against engine: a trainer of one rank in the test process, and batches that an engine sampled."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from slime.core.batch import TrainBatch, TrainSample
from slime.core.routed_experts import ExpertFormat
from slime.rollout.client.call import parse_experts
from tests.support.training import free_port, training_args


@functools.cache
def _freeze_once() -> None:
    gc.freeze()


@contextlib.contextmanager
def one_rank(checkpoint: Path, **settings: Any) -> Iterator[Any]:
    """A `MegatronBackend` of one rank, at version 1; one at a time, because Megatron's groups are global."""
    from slime.training.parallel import destroy_process_groups
    from tests.support.measured_backend import MeasuredBackend

    def made() -> MeasuredBackend:
        return MeasuredBackend(
            training_args(checkpoint, **settings),
            rank=0,
            world_size=1,
            local_rank=0,
            master_address="127.0.0.1",
            master_port=free_port(),
        )

    # What is there before the first one is never looked through again: the packages alone take half a second. Freezing
    # before each would keep what a test still holds of the one before, with dozens of threads of its groups.
    _freeze_once()
    try:
        with contextlib.closing(made()) as backend:
            backend.weight_version = 1
            yield backend
            del backend
    finally:
        destroy_process_groups()  # also of one that was refused half built
        gc.collect()  # threads of its groups end with it


def sampled(
    url: str, *, temperature: float = 1.0, num: int = 24, length: int = 48, experts: ExpertFormat | None = None
) -> TrainBatch:
    """`num` responses of `length` tokens to random prompts of unequal lengths, with the engine's log-probs and, given
    their format, its choices of experts."""
    rng = np.random.default_rng(7)
    prompts = [rng.integers(3, 100, int(rng.integers(2, 30))).tolist() for _ in range(num)]
    body = {
        "input_ids": prompts,
        "sampling_params": {"temperature": temperature, "max_new_tokens": length, "ignore_eos": True},
        "return_logprob": True,
        "return_routed_experts": experts is not None,
    }
    answers = httpx.post(f"{url}/generate", json=body, timeout=200).raise_for_status().json()
    samples = []
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        chosen = answer["meta_info"]["output_token_logprobs"]
        num_tokens = len(prompt) + len(chosen)
        routed = None if experts is None else parse_experts(answer, experts, start=0, num_tokens=num_tokens)
        samples.append(
            TrainSample(
                tokens=np.asarray(prompt + [c[1] for c in chosen], np.int64),
                loss_mask=np.ones(len(chosen), np.float32),
                rollout_log_probs=np.asarray([c[0] for c in chosen], np.float32),
                token_versions=np.ones(len(chosen), np.int32),
                reward=float(rng.normal()),
                group_index=index // 2,
                index=index,
                truncated=True,
                routed_experts=None if routed is None else routed.ids,
            )
        )
    return TrainBatch(rollout_id=0, samples=tuple(samples))
