"""One record of a model that ranks share: each parameter's names, split and holders, and this rank's shard of it.

Built once, from the family's table and what the ranks have. Loading, export, checkpoints, memory and other policies are
loops over it, and none of them works out of a name who has what.

Invariants
1. It names every parameter of the table and no other, on each rank the same ones; what it says of "this rank" differs.
2. It holds parameters and not their memory: a shard is a view that is taken when it is asked for, because Megatron's
   wrapper moves what is below.
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
from slime.training.model.policy import PolicyModel
from slime.training.state.adapter_files import A, B, adapters_alone, merge, without_adapters


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A parameter of the whole model. Each expert is one, though its rank stacks them."""

    entry: Entry
    """Its names, and its row: how it is split, and whether it stays float32."""
    shape: tuple[int, ...]
    """Of one shard."""
    dtype: torch.dtype
    """Of the parameter."""
    tp_rank: int = 0
    tp_size: int = 1
    """Which shard this tensor-parallel rank has, of how many; 0 of 1 for what is whole where it is."""
    pp_rank: int = 0
    """The holder's stage, the first that has it: a tied embedding has a copy on the last."""
    ep_rank: int = 0
    """The holder's expert-parallel rank, the only one that has an expert; the lowest for everything else."""
    trained: bool = True
    """Else it is frozen, or a buffer."""
    held: Held | None = None
    """Where this rank has its shard; None if it has none."""
    share: tuple[int, int] | None = None
    """(number, number of them) of the equal parts of its shard that this rank writes, as one of those that hold the
    same; None if the whole is another's to write."""

    @property
    def name(self) -> str:
        """In the whole model."""
        return self.entry.megatron

    @property
    def here(self) -> Held:
        """Where this rank has its shard, which it must."""
        assert self.held is not None, f"this rank has no {self.name}"
        return self.held

    @property
    def shard(self) -> Tensor:
        """This rank's shard: the parameter itself, or a view of its stack."""
        return self.here.of(self.here.parameter)


@dataclass(frozen=True, eq=False)
class ShardedModel:
    """All parameters of a model, and of them those that this rank has."""

    table: FamilyTable
    """Their rows, those of adapters among them."""
    tensors: Mapping[str, ShardedTensor]
    """By name; this rank's come first, in the order of its modules."""
    device: torch.device
    """Of this rank's shards."""
    adapter_scale: float | None = None
    """Of adapters when they are merged; None without."""

    @classmethod
    def of(
        cls,
        chunks: Sequence[PolicyModel],
        table: FamilyTable,
        trained: Container[str],
        adapter_scale: float | None = None,
    ) -> ShardedModel:
        """The record of the model that the `chunks` of all ranks are. Collective.

        `trained`: names of what is trained. Raises `ConfigError` if table and ranks do not name the same parameters.
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
        """Those that this rank has, in the order of its modules."""
        return tuple(tensor for tensor in self.tensors.values() if tensor.held is not None)

    @cached_property
    def parameters(self) -> tuple[Tensor, ...]:
        """Those that this rank has as its modules do: of a stack of experts one."""
        return tuple({id(own.here.parameter): own.here.parameter for own in self.own}.values())

    @property
    def shards(self) -> dict[str, Tensor]:
        """Name -> this rank's shard, where it is now."""
        return {own.name: own.shard for own in self.own}

    @cached_property
    def base(self) -> ShardedModel:
        """It without adapters: what a checkpoint of the family holds."""
        return self if self.adapter_scale is None else self.within(without_adapters(self.table))

    @cached_property
    def adapters(self) -> ShardedModel:
        """Its adapters alone, if there are any."""
        return self.within(adapters_alone(self.table))

    def within(self, table: FamilyTable) -> ShardedModel:
        """Its part that another table names."""
        names = set(table.megatron_names)
        return dataclasses.replace(self, table=table, tensors={n: t for n, t in self.tensors.items() if n in names})

    def at(self, tensors: Mapping[str, Tensor]) -> ShardedModel:
        """The same with these shards on this rank, such as those of another policy."""

        def moved(tensor: ShardedTensor) -> ShardedTensor:
            here = Held(tensors[tensor.name], None) if tensor.name in tensors else None
            return dataclasses.replace(tensor, held=here)

        return dataclasses.replace(self, tensors={name: moved(tensor) for name, tensor in self.tensors.items()})

    def adapter_of(self, weight: ShardedTensor) -> tuple[ShardedTensor, ShardedTensor] | None:
        """The adapter `a`, `b` of a weight, if it has one."""
        linear = weight.name.removesuffix("weight")
        return (self.tensors[linear + A], self.tensors[linear + B]) if linear + A in self.tensors else None

    @torch.no_grad()
    def merged(self, own: ShardedTensor) -> Tensor:
        """The shard of a weight as an export has it: with its adapter, rounded once; others as they are."""
        adapter = self.adapter_of(own)
        if adapter is None:
            return own.shard
        a, b = adapter
        assert self.adapter_scale is not None, f"{a.name} has no scale"
        return merge(own.shard, a.shard, b.shard, self.adapter_scale).to(own.dtype)


def split_of(entry: Entry) -> tuple[int, int]:
    """(this rank's shard, number of shards) of a parameter: ranks that are tensor parallel hold experts whole."""
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
    """Who has a parameter, and what its shard looks like there."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    ep_rank: int = 0
    pp_rank: int = 0


def _find_holders(held: Mapping[str, Held]) -> dict[str, _Holder]:
    """Name -> its first holder, for the parameters of all ranks."""
    own = {name: here.of(here.parameter) for name, here in held.items()}
    found = {name: _Holder(tuple(shard.shape), shard.dtype) for name, shard in own.items()}
    experts, stages = mpu.get_expert_model_parallel_group(), mpu.get_pipeline_model_parallel_group()
    return _first(_first(found, experts, "ep_rank"), stages, "pp_rank")


def _first(found: Mapping[str, _Holder], group: dist.ProcessGroup, rank_name: str) -> dict[str, _Holder]:
    """What the ranks of a group found, each of the lowest one that has it, which is noted as `rank_name`."""
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, found, group=group)
    holders: dict[str, _Holder] = {}
    for rank, part in enumerate(parts):
        for name, holder in part.items():
            if name not in holders:
                holders[name] = dataclasses.replace(holder, **{rank_name: rank})
    return holders
