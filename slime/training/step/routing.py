"""Expert routing in the passes over a batch: routers choose experts or replay the choices of engines or prior passes.

Engines record their choices during sampling (`--use-rollout-routing-replay`). The choices of the old-policy pass can be
recorded for the training passes (`--use-routing-replay`). Both are choices of the trained policy, so only its own
passes replay them. Reference, teacher and critic have different weights, so their routers choose freely.

Invariants
1. A record is split over ranks like the tokens of its row: context-parallel chunks, then sequence-parallel slices.
2. All passes over a batch use the same schedule, so a rank always replays what it recorded for the same micro-batch.
3. Without a record, passes are unaffected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from slime.core.batch import TrainBatch, TrainSample
from slime.core.errors import DataError
from slime.core.routed_experts import Ids, not_recorded
from slime.data.packing import PackedBatch
from slime.models.common.mlp import RowRouting
from slime.models.common.packed_attention import RowShard
from slime.settings import Args

Kept = dict[tuple[int, ...], dict[int, Tensor]]
"""A micro-batch's sample positions -> layer -> choices for this rank's tokens."""


@dataclass(frozen=True, slots=True)
class BatchRouting:
    samples: tuple[TrainSample, ...]
    """The batch's samples; empty if the engines' record is not used."""
    replays: bool
    """Whether to replay the engines' record instead of only comparing it."""
    counts: Tensor | None
    """This rank's counts; see `RowRouting`."""
    keeps: bool = False
    """Whether this pass writes `kept` instead of reading it."""
    kept: Kept = field(default_factory=dict)

    @classmethod
    def of(cls, args: Args, batch: TrainBatch, config: Any, device: torch.device) -> BatchRouting | None:
        """Returns the routing for the policy's first pass over a batch, or None if nothing is replayed or recorded.

        `config` is the policy's Megatron config. Raises `DataError` if a record comes from a
        different model, or if a record to replay is missing.
        """
        replays, keeps = args.use_rollout_routing_replay, args.use_routing_replay
        is_recorded = any(s.routed_experts is not None for s in batch.samples)
        if replays and not is_recorded:
            raise DataError(
                f"step {batch.rollout_id} has no routed experts, but --use-rollout-routing-replay requires them; the "
                "generate function must pass them to Sample.append_response_tokens(routed_experts=...)"
            )
        if not (is_recorded or keeps):
            return None
        _check(config, batch)
        counts = torch.zeros(2, dtype=torch.float64, device=device) if is_recorded else None
        return cls(batch.samples if is_recorded else (), replays, counts, keeps=keeps)

    def afterwards(self) -> BatchRouting | None:
        """Returns the routing for all later passes, or None without replay."""
        if self.keeps:
            return dataclasses.replace(self, samples=(), counts=None, keeps=False)
        return dataclasses.replace(self, counts=None) if self.replays else None

    def row(
        self, positions: Sequence[int], row: PackedBatch, shard: RowShard | None, device: torch.device
    ) -> RowRouting:
        """Returns the routing for the micro-batch with the samples at `positions`, packed as `row`."""
        key = tuple(positions)
        if not self.keeps and key in self.kept:
            return RowRouting(self.kept[key])
        kept: dict[int, Tensor] | None = {} if self.keeps and key else None
        if kept is not None:
            self.kept[key] = kept
        recorded = self._recorded(positions, row, shard, device)
        layers = {} if recorded is None else dict(enumerate(recorded.unbind(1)))
        return RowRouting(layers, self.replays, kept, self.counts)

    def _recorded(
        self, positions: Sequence[int], row: PackedBatch, shard: RowShard | None, device: torch.device
    ) -> Tensor | None:
        """Returns the record [T, L, topk] for this rank's tokens, or None if no sample of the micro-batch has one."""
        parts = [_fetched(self.samples[p]) for p in positions] if self.samples else []
        known = [part for part in parts if part is not None]
        if not known:
            return None
        whole = np.full((len(row.tokens), *known[0].shape[1:]), not_recorded(known[0].dtype), known[0].dtype)
        for rows, part in zip(row.token_rows, parts, strict=True):
            if part is not None:
                whole[rows[: len(part)]] = part
        ids = torch.from_numpy(whole).to(device, non_blocking=True)
        if shard is not None:
            ids = ids.index_select(0, shard.positions)
        # With experts, tensor parallelism always implies sequence parallelism.
        slices = mpu.get_tensor_model_parallel_world_size() if mpu.is_initialized() else 1
        return ids.chunk(slices)[mpu.get_tensor_model_parallel_rank()] if slices > 1 else ids

    def metrics(self, batch: TrainBatch, own: Sequence[int]) -> dict[str, float]:
        """Returns metrics of the engines' record, identical on every rank. Collective if there is a record.

        `own`: positions of the samples that this rank reports. Exactly one rank reports each sample.
        """
        if self.counts is None:
            return {}
        unrecorded = sum(_unrecorded(batch.samples[p]) for p in own)
        counts = torch.cat([self.counts, self.counts.new_tensor([unrecorded])])
        dist.all_reduce(counts)
        compared, differing, unrecorded = counts.tolist()
        size = sum(s.routed_experts.nbytes for s in batch.samples if s.routed_experts is not None)
        shares = {"train/routing_changed": differing / compared} if compared else {}
        return {
            **shares,
            "train/routing_unrecorded_tokens": unrecorded,
            "train/routing_bytes_per_token": size / sum(s.num_tokens for s in batch.samples),
        }


def _check(config: Any, batch: TrainBatch) -> None:
    expected = (config.num_layers, config.moe_router_topk)
    for s in batch.samples:
        if s.routed_experts is not None and s.routed_experts.shape[1:] != expected:
            raise DataError(
                f"sample {s.index} has routed experts of {s.routed_experts.shape[1:]} (layers, choices), but the "
                f"trainer's model has {expected}: a different model recorded them; check --hf-checkpoint"
            )


def _fetched(sample: TrainSample) -> Ids | None:
    return None if sample.routed_experts is None else np.asarray(sample.routed_experts)


def _unrecorded(sample: TrainSample) -> int:
    """Counts the trained tokens whose preceding token has no record."""
    recorded = np.zeros(sample.num_tokens, np.bool_)
    if (ids := _fetched(sample)) is not None:
        recorded[: len(ids)] = ids[:, 0, 0] != not_recorded(ids.dtype)
    first = sample.num_tokens - sample.response_length - 1
    return int(((sample.loss_mask > 0) & ~recorded[first : first + sample.response_length]).sum())
