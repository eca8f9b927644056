"""Converts full HF tensors to the weights of a sharded model, and back for weight syncs and `--save-hf`.

Each parameter is on one pipeline stage. An expert is on one expert-parallel rank of that stage; everything else is
split over tensor-parallel ranks. For an export, the holder broadcasts its shard over the expert group and then over the
pipeline, so that every rank has the shard of its tensor-parallel rank. Then the shards are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from slime.models.common.table import Entry
from slime.training.state.hf_files import HfReader
from slime.training.state.sharded_model import ShardedModel, ShardedTensor
from slime.training.state.shards import iter_full
from slime.weights.hf_shards import load_shard

COPY_BYTES = 32 * 2**20
"""Maximum number of file bytes in memory while they are copied to a parameter."""


@torch.no_grad()
def load_weights(model: ShardedModel, directory: Path) -> None:
    """Copies this rank's shard of every tensor of an HF checkpoint, one at a time, cast to the parameter's dtype.

    Raises `ConfigError` if model and checkpoint have different tensors, and `CheckpointError` if a shape is wrong.
    """
    with HfReader(directory) as read:
        model.table.check(hf_names=read.names)
        fill(model, read)


@torch.no_grad()
def fill(model: ShardedModel, read: HfReader) -> None:
    """Loads the shards of `model`, which can be any rank's model.

    Copies at most `COPY_BYTES` at a time, so shards that are views of a file need no additional memory.
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


def iter_hf_tensors(
    model: ShardedModel, *, dtype: torch.dtype | None = None, merged: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yields (HF name, full tensor) in table order on every rank. Collective: all ranks must exhaust the iterator.

    With `merged`, adapters are merged into the weights instead of being listed. Rows that must stay float32 are not
    cast. Tensors can share memory with the parameters, so callers must not modify them.
    """
    alone = mpu.get_expert_model_parallel_world_size() == mpu.get_pipeline_model_parallel_world_size() == 1

    def wanted(tensor: ShardedTensor) -> torch.dtype:
        return dtype if dtype is not None and not tensor.entry.row.wide else tensor.dtype

    def shards(entry: Entry) -> list[Tensor]:
        tensor = model.tensors[entry.megatron]
        like = torch.empty(0, dtype=wanted(tensor), device=model.device)
        local = None
        if tensor.held is not None:
            local = (model.merged(tensor) if merged else tensor.shard).detach().to(like.dtype)
        shard = _send(tensor, local, like)
        return [shard] if tensor.tp_size == 1 else _gather(shard)

    def stack(first: Entry) -> Tensor | None:
        """Returns the stack of a row's experts if this rank holds all of them and they need no conversion."""
        tensor = model.tensors[first.megatron]
        if not alone or wanted(tensor) != tensor.dtype or (merged and model.adapter_of(tensor)):
            return None
        return tensor.here.parameter.detach() if tensor.here.number is not None else None

    return iter_full((model.base if merged else model).table, shards, stack)


def _send(tensor: ShardedTensor, local: Tensor | None, like: Tensor) -> Tensor:
    """Sends the holder's shard to every rank of its expert group and pipeline. Returns the shard."""
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
        assert local is not None, "the source rank does not hold the parameter"
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
