"""Weights of a sharded model and full HF tensors: load on start, export for weight sync and `--save-hf`.

A parameter lives on one pipeline stage, an expert on one expert-parallel rank of it, and everything else is split over
the tensor-parallel ranks. On export its holder sends it over the expert group, then over the pipeline, so that every
rank has this tensor-parallel shard; then the shards are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from slime.models.common.table import Entry
from slime.training.state.hf_files import HfReader
from slime.training.state.sharded_model import ShardedModel, ShardedTensor
from slime.training.state.shards import iter_full
from slime.weights.convert import load_shard

COPY_BYTES = 32 * 2**20
"""How much of a file is in memory at once while it is copied to a parameter."""


@torch.no_grad()
def load_weights(model: ShardedModel, directory: Path) -> None:
    """Copies this rank's shard of every tensor of an HF checkpoint, one at a time, cast to the parameter's dtype.

    Raises `ConfigError` if model and checkpoint do not name the same tensors, `CheckpointError` on a wrong shape.
    """
    with HfReader(directory) as read:
        model.table.check(hf_names=read.names)
        fill(model, read)


@torch.no_grad()
def fill(model: ShardedModel, read: HfReader) -> None:
    """What one rank loads, without asking which one it is.

    Rows of at most `COPY_BYTES` are copied at a time: of a shard that is a view of a file no more is in memory.
    """
    for own in model.own:
        shard = load_shard(model.table, own.name, read, tp_rank=own.tp_rank, tp_size=own.tp_size)
        parameter = own.shard
        assert shard.shape == parameter.shape, (
            f"{own.name}: shard {list(shard.shape)}, parameter {list(parameter.shape)}"
        )
        rows = max(1, COPY_BYTES * len(shard) // max(1, shard.nbytes))
        for target, source in zip(parameter.split(rows), shard.split(rows), strict=True):
            target.copy_(source)
            read.release()


@torch.no_grad()
def iter_hf_tensors(
    model: ShardedModel,
    *,
    dtype: torch.dtype | None = None,
    shard_of: Callable[[ShardedTensor], Tensor] = lambda own: own.shard,
) -> Iterator[tuple[str, Tensor]]:
    """(HF name, full tensor) in table order, on every rank. A collective: all ranks must exhaust it.

    `shard_of`: what stands for this rank's shard, such as a merged one. Rows that stay float32 are not converted. On
    one rank and without conversion the tensors may share memory with the parameters: do not write to them.
    """

    def shards(entry: Entry) -> list[Tensor]:
        tensor = model.tensors[entry.megatron]
        wanted = dtype if dtype is not None and not entry.row.wide else tensor.dtype
        local = None if tensor.held is None else shard_of(tensor).detach().to(wanted)
        shard = _send(tensor, local, torch.empty(0, dtype=wanted, device=model.device))
        return [shard] if tensor.tp_size == 1 else _gather(shard)

    yield from iter_full(model.table, shards)  # a generator: `no_grad` holds while it runs


def _send(tensor: ShardedTensor, local: Tensor | None, like: Tensor) -> Tensor:
    """The holder's shard, on every rank of its expert group and of its pipeline."""
    experts, pipeline = mpu.get_expert_model_parallel_group(), mpu.get_pipeline_model_parallel_group()
    if tensor.entry.expert is not None and experts.size() > 1 and pipeline.rank() == tensor.pp_rank:
        local = _broadcast(local, tensor.shape, tensor.ep_rank, experts, like)
    if pipeline.size() > 1:
        local = _broadcast(local, tensor.shape, tensor.pp_rank, pipeline, like)
    assert local is not None, f"no rank sent {tensor.name}"
    return local


def _broadcast(
    local: Tensor | None, shape: tuple[int, ...], source: int, group: dist.ProcessGroup, like: Tensor
) -> Tensor:
    if group.rank() == source:
        assert local is not None, "the holder has the parameter"
        buffer = local.contiguous()
    else:
        buffer = like.new_empty(shape)
    dist.broadcast(buffer, src=dist.get_global_rank(group, source), group=group)
    return buffer


def _gather(local: Tensor) -> list[Tensor]:
    group = mpu.get_tensor_model_parallel_group()
    shards = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(shards, local.contiguous(), group=group)
    return shards
