"""This rank's Megatron parameters and full HF tensors: load on start, export for weight sync and `--save-hf`.

Names are those of the whole model (`names`). A parameter lives on one pipeline stage, an expert on one expert-parallel
rank of it, and everything else is split over the tensor-parallel ranks. On export its holder sends it over the expert
group, then over the pipeline, so that every rank has this tensor-parallel shard; then the shards are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from slime.models.common.table import Entry, FamilyTable
from slime.training.model.names import is_expert
from slime.training.state.hf_files import HfReader
from slime.training.state.shards import iter_full
from slime.weights.convert import load_shard

COPY_BYTES = 32 * 2**20
"""How much of a file is in memory at once while it is copied to a parameter."""

ParameterMap = Mapping[str, Tensor]
"""Global Megatron name -> local parameter."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Where a parameter lives."""

    pp_rank: int
    """The first stage that has it: a tied embedding has a copy on the last."""
    ep_rank: int
    """The expert-parallel rank that has an expert; the lowest for everything else."""
    shape: tuple[int, ...]
    """Of one rank's shard."""
    dtype: torch.dtype
    """Of the parameter."""


def find_holders(parameters: ParameterMap) -> dict[str, Holder]:
    """Global name -> holder, for the parameters of all ranks. Collective."""
    own = {name: (tuple(p.shape), p.dtype) for name, p in parameters.items()}
    on_stage: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
    for ep_rank, part in enumerate(_gather_objects(own, mpu.get_expert_model_parallel_group())):
        for name, facts in part.items():
            on_stage.setdefault(name, (ep_rank, *facts))
    holders: dict[str, Holder] = {}
    for pp_rank, stage in enumerate(_gather_objects(on_stage, mpu.get_pipeline_model_parallel_group())):
        for name, found in stage.items():
            holders.setdefault(name, Holder(pp_rank, *found))
    return holders


@torch.no_grad()
def load_weights(parameters: ParameterMap, table: FamilyTable, directory: Path, holders: Mapping[str, Holder]) -> None:
    """Copies this rank's shard of every tensor of an HF checkpoint, one at a time, cast to the parameter's dtype.

    Raises `ConfigError` if table, model and checkpoint do not name the same tensors, `CheckpointError` on a
    wrong shape.
    """
    rank, size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    with HfReader(directory) as read:
        table.check(megatron_names=holders, hf_names=read.names)
        fill(parameters, table, read, tp_rank=rank, tp_size=size)


@torch.no_grad()
def fill(parameters: ParameterMap, table: FamilyTable, read: HfReader, *, tp_rank: int, tp_size: int) -> None:
    """What one rank loads, without asking which one it is.

    Rows of at most `COPY_BYTES` are copied at a time: of a shard that is a view of a file no more is in memory.
    """
    for name, parameter in parameters.items():
        rank, size = (0, 1) if is_expert(name) else (tp_rank, tp_size)
        shard = load_shard(table, name, read, tp_rank=rank, tp_size=size)
        assert shard.shape == parameter.shape, f"{name}: shard {list(shard.shape)}, parameter {list(parameter.shape)}"
        rows = max(1, COPY_BYTES * len(shard) // max(1, shard.nbytes))
        for target, source in zip(parameter.split(rows), shard.split(rows), strict=True):
            target.copy_(source)
            read.release()


@torch.no_grad()
def iter_hf_tensors(
    parameters: ParameterMap,
    table: FamilyTable,
    holders: Mapping[str, Holder],
    *,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(HF name, full tensor) in table order, on every rank. A collective: all ranks must exhaust it.

    Rows that stay float32 are not converted. On one rank and without conversion the tensors may share memory with the
    parameters: do not write to them.
    """
    like = next(iter(parameters.values()))

    def shards(entry: Entry) -> list[Tensor]:
        name, holder = entry.megatron, holders[entry.megatron]
        wanted = dtype if dtype is not None and not entry.row.wide else holder.dtype
        local = parameters.get(name)
        if local is not None:
            local = local.detach().to(wanted)
        shard = _send(name, local, holder, like.new_empty(0, dtype=wanted))
        return [shard] if entry.row.dim is None or is_expert(name) else _gather(shard)

    yield from iter_full(table, shards)  # a generator: `no_grad` holds while it runs


def _send(name: str, local: Tensor | None, holder: Holder, like: Tensor) -> Tensor:
    """The holder's shard, on every rank of its expert group and of its pipeline."""
    experts, pipeline = mpu.get_expert_model_parallel_group(), mpu.get_pipeline_model_parallel_group()
    if is_expert(name) and experts.size() > 1 and pipeline.rank() == holder.pp_rank:
        local = _broadcast(local, holder.shape, holder.ep_rank, experts, like)
    if pipeline.size() > 1:
        local = _broadcast(local, holder.shape, holder.pp_rank, pipeline, like)
    assert local is not None, f"no rank sent {name}"
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
    if group.size() == 1:
        return [local]
    shards = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(shards, local.contiguous(), group=group)
    return shards


def _gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    out: list[Any] = [None] * group.size()
    dist.all_gather_object(out, value, group=group)
    return out
