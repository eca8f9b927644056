"""This rank's Megatron parameters and full HF tensors: load on start, export for weight sync and `--save-hf`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from slime.training.hf_files import HfReader
from slime.weights.convert import export, load_shard
from slime.weights.tables import FamilyTable, Kind

ParameterMap = Mapping[str, Tensor]
"""Megatron name -> local parameter."""


@torch.no_grad()
def load_weights(parameters: ParameterMap, table: FamilyTable, directory: Path, *, tp_rank: int, tp_size: int) -> None:
    """Copies this rank's shard of every tensor of an HF checkpoint, one at a time, cast to the parameter's dtype.

    Raises `ConfigError` if table, model and checkpoint do not name the same tensors, `CheckpointError` on a
    wrong shape.
    """
    with HfReader(directory) as read:
        table.check(megatron_names=parameters, hf_names=read.names)
        for name, parameter in parameters.items():
            shard = load_shard(table, name, read, tp_rank=tp_rank, tp_size=tp_size)
            assert shard.shape == parameter.shape, (
                f"{name}: shard {list(shard.shape)}, parameter {list(parameter.shape)}"
            )
            parameter.copy_(shard)


@torch.no_grad()
def iter_hf_tensors(
    parameters: ParameterMap,
    table: FamilyTable,
    *,
    tp_group: dist.ProcessGroup | None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(HF name, full tensor) in table order, on every rank of the group. A collective: all ranks must exhaust it.

    Without tensor parallelism and conversion the tensors may share memory with the parameters: do not write to them.
    """
    for entry in table.entries:
        parameter = parameters[entry.megatron].detach()
        local = parameter if dtype is None else parameter.to(dtype)
        shards = [local] if entry.kind is Kind.COPY else _gather(local, tp_group)
        yield from export(table, entry.megatron, shards)


def _gather(local: Tensor, tp_group: dist.ProcessGroup | None) -> list[Tensor]:
    if tp_group is None or tp_group.size() == 1:
        return [local]
    shards = [torch.empty_like(local) for _ in range(tp_group.size())]
    dist.all_gather(shards, local.contiguous(), group=tp_group)
    return shards
