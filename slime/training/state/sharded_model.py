"""A record of a model that is sharded over ranks: the names, split, holders and local shard of each parameter.

It is built once, from the family's table and the parameters on each rank. Loading, exports, checkpoints, memory plans
and offloaded policies iterate over it, so none of them has to work out which rank holds a parameter.

Invariants
1. On every rank, the record has exactly the parameters of the table. Only the fields about "this rank" differ.
2. The record references parameters, not their memory. Shards are views created on demand, because Megatron's DDP moves
   parameters to other memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from slime.models.common.table import Entry, FamilyTable
from slime.training.model.parameter_names import Held, held_by
from slime.training.model.policy_model import PolicyModel
from slime.training.state.adapter_files import A, B, adapters_alone, merge, without_adapters


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A parameter of the full model. Each expert has its own record, even if its rank stacks experts."""

    entry: Entry
    """Names and table row. The row says how the parameter is split and whether it must stay float32."""
    shape: tuple[int, ...]
    """Shape of one shard."""
    dtype: torch.dtype
    tp_rank: int = 0
    tp_size: int = 1
    """This rank has tensor-parallel shard `tp_rank` of `tp_size`; 0 of 1 if the parameter is not split."""
    pp_rank: int = 0
    """The first pipeline stage that has this parameter. A tied embedding also has a copy on the last stage."""
    ep_rank: int = 0
    """The expert-parallel rank that holds an expert; 0 for all other parameters."""
    trained: bool = True
    """False for frozen parameters and buffers."""
    held: Held | None = None
    """Local storage of this rank's shard; None if it has no shard."""
    share: tuple[int, int] | None = None
    """(number, count): `count` ranks divide this shard when they save it, and this rank saves portion `number`. None if
    this rank saves nothing."""

    @property
    def name(self) -> str:
        return self.entry.megatron

    @property
    def here(self) -> Held:
        """`held`, asserted not to be None."""
        assert self.held is not None, f"this rank does not hold {self.name}"
        return self.held

    @property
    def shard(self) -> Tensor:
        """This rank's shard: the parameter itself, or a view of the stack of experts."""
        return self.here.of(self.here.parameter)


@dataclass(frozen=True, eq=False)
class ShardedModel:
    """The parameters of the whole model, and this rank's shards of them."""

    table: FamilyTable
    """Rows of all parameters, including adapters."""
    tensors: Mapping[str, ShardedTensor]
    """Name -> parameter. This rank's parameters come first, in module order."""
    device: torch.device
    adapter_scale: float | None = None
    """Scale for merging adapters; None without adapters."""

    @classmethod
    def of(
        cls,
        chunks: Sequence[PolicyModel],
        table: FamilyTable,
        trained: Container[str],
        adapter_scale: float | None = None,
    ) -> ShardedModel:
        """Builds the record of a model from the `chunks` of all ranks. Collective.

        `trained`: the trained parameters' names. Raises `ConfigError` if the ranks' parameters do not match `table`.
        """
        held = held_by(chunks)
        holders = _find_holders(held)
        table.check(megatron_names=holders)
        tensors = {}
        for name in (*held, *(name for name in holders if name not in held)):
            entry, here, holder = table.entry(name), held.get(name), holders[name]
            tp_rank, tp_size = split_of(entry)
            tensors[name] = ShardedTensor(
                entry,
                holder.shape,
                holder.dtype,
                tp_rank=tp_rank,
                tp_size=tp_size,
                pp_rank=holder.pp_rank,
                ep_rank=holder.ep_rank,
                trained=name in trained,
                held=here,
                share=_share(entry, holder.pp_rank) if here is not None else None,
            )
        return cls(table, tensors, next(chunks[0].parameters()).device, adapter_scale)

    @cached_property
    def own(self) -> tuple[ShardedTensor, ...]:
        """The parameters that this rank holds, in module order."""
        return tuple(tensor for tensor in self.tensors.values() if tensor.held is not None)

    @cached_property
    def parameters(self) -> tuple[Tensor, ...]:
        """The parameters of this rank's modules. A stack of experts is one parameter."""
        return tuple({id(own.here.parameter): own.here.parameter for own in self.own}.values())

    @property
    def shards(self) -> dict[str, Tensor]:
        """Name -> view of this rank's shard at its current memory address."""
        return {own.name: own.shard for own in self.own}

    @cached_property
    def base(self) -> ShardedModel:
        """The model without adapters, as in an HF checkpoint."""
        return self if self.adapter_scale is None else self.within(without_adapters(self.table))

    @cached_property
    def adapters(self) -> ShardedModel:
        return self.within(adapters_alone(self.table))

    def within(self, table: FamilyTable) -> ShardedModel:
        names = set(table.megatron_names)
        return dataclasses.replace(self, table=table, tensors={n: t for n, t in self.tensors.items() if n in names})

    def at(self, tensors: Mapping[str, Tensor]) -> ShardedModel:
        """Returns the same model with `tensors` as this rank's shards, for example those of another policy."""

        def moved(tensor: ShardedTensor) -> ShardedTensor:
            here = Held(tensors[tensor.name], None) if tensor.name in tensors else None
            return dataclasses.replace(tensor, held=here)

        return dataclasses.replace(self, tensors={name: moved(tensor) for name, tensor in self.tensors.items()})

    def adapter_of(self, weight: ShardedTensor) -> tuple[ShardedTensor, ShardedTensor] | None:
        """Returns the adapter (`a`, `b`) of a weight, or None if it has none."""
        linear = weight.name.removesuffix("weight")
        return (self.tensors[linear + A], self.tensors[linear + B]) if linear + A in self.tensors else None

    @torch.no_grad()
    def merged(self, own: ShardedTensor) -> Tensor:
        """Returns a weight's shard for export, merged with its adapter and rounded once."""
        adapter = self.adapter_of(own)
        if adapter is None:
            return own.shard
        a, b = adapter
        assert self.adapter_scale is not None, f"{a.name} has no scale"
        return merge(own.shard, a.shard, b.shard, self.adapter_scale).to(own.dtype)


def split_of(entry: Entry) -> tuple[int, int]:
    """Returns (index of this rank's shard, number of shards). Experts are not split by tensor parallelism."""
    if entry.expert is not None or entry.row.dim is None:
        return 0, 1
    return mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()


def _share(entry: Entry, pp_rank: int) -> tuple[int, int] | None:
    if entry.expert is not None:
        group = mpu.get_expert_data_parallel_group()
        return group.rank(), group.size()
    repeated = entry.row.dim is None and mpu.get_tensor_model_parallel_rank() > 0
    if repeated or mpu.get_pipeline_model_parallel_rank() != pp_rank:
        return None
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    return group.rank(), group.size()


@dataclass(frozen=True, slots=True)
class _Holder:
    shape: tuple[int, ...]
    dtype: torch.dtype
    ep_rank: int = 0
    pp_rank: int = 0


def _find_holders(held: Mapping[str, Held]) -> dict[str, _Holder]:
    own = {name: here.of(here.parameter) for name, here in held.items()}
    found = {name: _Holder(tuple(shard.shape), shard.dtype) for name, shard in own.items()}
    experts, stages = mpu.get_expert_model_parallel_group(), mpu.get_pipeline_model_parallel_group()
    return _first(_first(found, experts, "ep_rank"), stages, "pp_rank")


def _first(found: Mapping[str, _Holder], group: dist.ProcessGroup, rank_name: str) -> dict[str, _Holder]:
    """Merges `found` over all ranks of a group. The lowest rank wins and is recorded in the field `rank_name`."""
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, found, group=group)
    holders: dict[str, _Holder] = {}
    for rank, part in enumerate(parts):
        for name, holder in part.items():
            if name not in holders:
                holders[name] = dataclasses.replace(holder, **{rank_name: rank})
    return holders
