"""Settings and batches for tests of the trainer: what `parse_args` would give, and random batches of unequal
samples.
"""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from typing import Any

import numpy as np

from slime.core.batch import TrainBatch, TrainSample
from slime.core.routed_experts import not_recorded
from slime.settings import Args
from slime.settings.all_flags import components, components_with, entries_named_in
from slime.settings.args import Passthrough
from slime.settings.resolve import Resolver, args_of
from tests.support.openness import listening, sockets_of

MEGATRON: dict[str, Any] = {
    "lr": 1e-3,
    "min_lr": 0.0,
    "lr_decay_style": "constant",
    "lr_decay_iters": None,
    "lr_warmup_iters": 0,
    "lr_warmup_init": 0.0,
    "lr_wsd_decay_iters": None,
    "lr_wsd_decay_style": "exponential",
    "train_iters": None,
    "weight_decay": 0.1,
    "start_weight_decay": 0.1,
    "end_weight_decay": 0.1,
    "weight_decay_incr_style": "constant",
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "clip_grad": 1.0,
    "bf16": False,
    "gradient_accumulation_fusion": True,
    "tensor_model_parallel_size": 1,
    "distributed_timeout_minutes": 2,
}
"""A constant schedule in float32 on one rank."""
MUON: dict[str, Any] = {
    "optimizer": "muon",
    "muon_momentum": 0.95,
    "muon_nesterov": False,
    "muon_split_qkv": True,
    "muon_num_ns_steps": 5,
    "muon_fp32_matmul_prec": "highest",
    "muon_scale_mode": "spectral",
    "muon_extra_scale_factor": 1.0,
    "muon_tp_mode": "duplicated",
}
"""Muon as slime's defaults have it, with products in float32."""


def training_args(
    checkpoint: Path,
    *,
    megatron: dict[str, Any] | None = None,
    critic: dict[str, Any] | None = None,
    **changes: Any,
) -> Args:
    """The settings that the trainer reads, with their public names and defaults; derived ones follow `changes`.

    `critic`: those of Megatron that the critic alone has.
    """
    values: dict[str, Any] = {
        "hf_checkpoint": str(checkpoint),
        "device": "cpu",
        "distributed_timeout_minutes": 2,
        "num_rollout": 1,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": 16,
        "global_batch_size": 8,
        "num_steps_per_rollout": 1,
        "micro_batch_size": 2,
        "log_probs_chunk_size": 16,
        "eps_clip_high": 0.28,
        "kl_loss_type": "k3",
        "mismatch_limit": 1e9,
    }
    given = values | changes
    known = components_with(entries_named_in(given, components()))
    unknown = [name for name in given if not known.knows(name)]
    assert not unknown, f"no settings of slime: {unknown}"
    of_megatron = {name: (value, "given") for name, value in {**MEGATRON, **(megatron or {})}.items()}
    args = args_of(
        Resolver(known, given, origins=dict.fromkeys(given, "given"), megatron=of_megatron, passed={}),
    )
    return args.replace(critic=Passthrough("critic", critic or {}))


def random_batch(
    num_groups: int = 4,
    group_size: int = 2,
    *,
    seed: int = 0,
    vocab_size: int = 128,
    response_lengths: tuple[int, int] = (2, 14),
) -> TrainBatch:
    """Samples of unequal prompts and responses, some tokens masked, log-probs near a uniform policy, version 1."""
    rng = np.random.default_rng(seed)
    samples = []
    for index in range(num_groups * group_size):
        prompt, response = int(rng.integers(1, 9)), int(rng.integers(*response_lengths))
        mask = (rng.random(response) < 0.8).astype(np.float32)
        mask[0] = 1.0
        samples.append(
            TrainSample(
                tokens=rng.integers(3, vocab_size, prompt + response).astype(np.int32),
                loss_mask=mask,
                rollout_log_probs=(rng.normal(-4.8, 0.1, response)).astype(np.float32),
                token_versions=np.where(mask > 0, 1, -1).astype(np.int32),
                reward=float(rng.normal()),
                group_index=index // group_size,
                index=index,
                truncated=False,
            )
        )
    return TrainBatch(rollout_id=0, samples=tuple(samples))


def forked_batch(num_groups: int = 3, *, seed: int = 0, vocab_size: int = 128) -> TrainBatch:
    """Groups of four samples of one prompt of at least 20 tokens: two of them with a common first turn, of which the
    second has a mask of its own, one that is the beginning of another, and one with an answer to itself.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(num_groups):
        prompt, turn, first, second, third = (
            rng.integers(3, vocab_size, int(rng.integers(low, high)))
            for low, high in ((20, 30), (17, 24), (2, 9), (2, 9), (2, 9))
        )
        answers = [[turn, first], [third], [turn, second], [turn, first, third]]
        for answer in answers:
            response = np.concatenate(answer)
            mask = (rng.random(len(response)) < 0.8).astype(np.float32)
            mask[-1] = 1.0
            samples.append(
                TrainSample(
                    tokens=np.concatenate([prompt, response]).astype(np.int32),
                    loss_mask=mask,
                    rollout_log_probs=(rng.normal(-4.8, 0.1, len(response))).astype(np.float32),
                    token_versions=np.where(mask > 0, 1, -1).astype(np.int32),
                    reward=float(rng.normal()),
                    group_index=group,
                    index=len(samples),
                    truncated=False,
                )
            )
    return TrainBatch(rollout_id=0, samples=tuple(samples))


BRANCHES: tuple[tuple[str, ...], ...] = (
    ("plan", "look", "edit", "test"),
    ("plan", "look", "edit", "again"),
    ("plan", "look"),
    ("plan", "ask", "edit"),
    ("other", "look", "edit"),
)
"""The turns of an agent's branches after the prompt. They fork after no turn, after one, two and three; the third is
the beginning of the first, and equal turns behind different ones are not shared."""


def agent_batch(num_groups: int = 2, executions: int = 2, *, seed: int = 0, vocab_size: int = 128) -> TrainBatch:
    """The branches (`BRANCHES`) of several executions for each of a few prompts, shuffled.

    Executions share the prompt alone, and branches of an execution their first turns. Each branch has masks, rewards
    of tokens and a reward of its own, so a shared token may be trained in one branch and context in another, but what
    an engine did once, a log-prob, is the same in all.
    """
    rng = np.random.default_rng(seed)
    made: list[dict[str, Any]] = []
    for group in range(num_groups):
        prompt = rng.integers(3, vocab_size, int(rng.integers(17, 24)))
        for execution in range(executions):
            turns: dict[tuple[str, ...], Any] = {}
            for branch in BRANCHES:
                for end in range(1, len(branch) + 1):
                    size = int(rng.integers(3, 9))
                    new = rng.integers(3, vocab_size, size), rng.normal(-4.8, 0.1, size)
                    turns.setdefault(branch[:end], new)
                parts = [turns[branch[:end]] for end in range(1, len(branch) + 1)]
                response, log_probs = (np.concatenate(x) for x in zip(*parts, strict=True))
                mask = (rng.random(len(response)) < 0.6).astype(np.float32)
                mask[-1] = 1.0
                made.append(
                    {
                        "tokens": np.concatenate([prompt, response]).astype(np.int32),
                        "loss_mask": mask,
                        "rollout_log_probs": log_probs.astype(np.float32),
                        "token_versions": np.where(mask > 0, 1, -1).astype(np.int32),
                        "token_rewards": np.where(mask > 0, rng.normal(size=len(response)), 0.0),
                        "reward": float(rng.normal()),
                        "group_index": group,
                        "index": group * executions + execution,
                        "truncated": False,
                    }
                )
    return TrainBatch(rollout_id=0, samples=tuple(TrainSample(**made[i]) for i in rng.permutation(len(made))))


def with_samples(batch: TrainBatch, samples: list[TrainSample]) -> TrainBatch:
    """The same batch holding other samples."""
    return dataclasses.replace(batch, samples=tuple(samples))


def with_routed_experts(
    batch: TrainBatch, num_layers: int, num_experts: int, topk: int, *, seed: int = 5, recorded: float = 0.8
) -> TrainBatch:
    """The same batch with experts that an engine might have chosen, at random; of some tokens there is no record."""
    rng = np.random.default_rng(seed)

    def record(num_rows: int) -> Any:
        ids = rng.random((num_rows, num_layers, num_experts)).argsort(-1)[..., :topk].astype(np.uint8)
        ids[rng.random(num_rows) >= recorded] = not_recorded(np.uint8)
        return ids

    return with_samples(batch, [dataclasses.replace(s, routed_experts=record(s.num_tokens - 1)) for s in batch.samples])


def listening_addresses(pid: int) -> set[str]:
    """Addresses on which a process listens for TCP, over IPv4 or IPv6."""
    own, found = sockets_of(pid), listening(Path(f"/proc/{pid}/net"))
    return {where.address for inode, where in found.items() if inode in own and where.kind in ("tcp", "tcp6")}


def free_port() -> int:
    """A port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
