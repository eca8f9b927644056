"""Gathers the trainer's weights for the engines. In each turn (`send_plan.Turn`), ranks pass shards to the sender.

A parameter is sent by ranks of the pipeline stage that holds it. The sender gathers the shards from its tensor-parallel
ranks and receives experts from the expert-parallel ranks that hold them. Small parameters are batched into messages. A
rank waits for its tensor-parallel and expert-parallel groups only inside their collectives.

Invariants
1. Every rank iterates over all turns in the same order, and participates if the sender is in one of its groups.
2. In addition to its shards and buckets, a rank holds one message of at most `limit / MESSAGES` bytes. Including inputs
   and results, a message takes at most four times its size. A larger parameter is a message by itself and takes at most
   two and a half times its size. If layers have such parameters, buckets shrink by that amount, but not below
   `LEAST_BUCKET` of the limit. A parameter that still does not fit is reported (`fill_bytes`) and is gathered while no
   other bucket is in memory.
3. An error in a tensor is raised at the end of the turn, after all ranks have passed on their shards.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from slime.core.errors import SlimeError, WeightSyncError
from slime.models.common.table import Entry, FamilyTable
from slime.training.state.sharded_model import ShardedModel, ShardedTensor
from slime.weights.hf_shards import export, export_stack
from slime.weights.send_plan import Spec, TensorGroup, Turn, turns_of

MESSAGES = 16
"""Minimum number of messages in a bucket."""
MESSAGE_TIMES = 4
"""Peak memory of a message with several parameters, as a multiple of its size."""
PARAMETER_TIMES = 2.5
"""Peak memory of a larger parameter, as a multiple of its size: gathered, outgoing, and this rank's shard if cast."""
LEAST_BUCKET = 0.5
"""Minimum bucket size as a fraction of the limit. A parameter that would leave less is gathered separately."""


@dataclass(frozen=True, slots=True)
class _Message:
    """Parameters of one dtype that ranks exchange together. Experts must also have the same table row and holder."""

    tensors: tuple[ShardedTensor, ...]
    dtype: torch.dtype

    @property
    def expert(self) -> bool:
        return self.tensors[0].entry.expert is not None


class TrainerWeights:
    """Implements `weights.send_plan.Outgoing` for one training rank. The constructor is collective."""

    def __init__(self, model: ShardedModel, dtype: torch.dtype | None = None) -> None:
        """`dtype` is the engines' dtype; None keeps the training dtype. Rows that must stay float32 are not cast."""
        self._model, self._dtype = model, dtype
        self.table: FamilyTable = model.base.table
        self.device = model.device
        # Untested on GPUs, where broadcasts would overlap with the gathers of other ranks' turns.
        takes_turns = self.table.sizes.num_experts > 0 and self.device.type == "cpu"
        self._senders = _senders(takes_turns=takes_turns)
        self._tensor_ranks = frozenset(dist.get_process_group_ranks(mpu.get_tensor_model_parallel_group()))
        self._expert_ranks = dist.get_process_group_ranks(mpu.get_expert_model_parallel_group())
        self._rank = dist.get_rank()
        self._turns: tuple[int, tuple[Turn, ...]] = (0, ())
        """The limit in bytes, and the turns for this limit."""
        self._room = 0
        """Number of bytes that each of the two buckets leaves free for gathering."""
        self._wrong: Exception | None = None
        """First error in the current turn."""

    def turns(self, limit_bytes: int) -> Sequence[Turn]:
        """Returns all turns. Buckets leave room for gathering, so a sender needs at most twice `limit_bytes`."""
        if self._turns[0] != limit_bytes:
            groups, message = list(self._tensor_groups()), max(1, limit_bytes // MESSAGES)
            in_layers = [_bytes_of(p, message) for p in groups if p.entries[0].layer is not None]
            room = max([MESSAGE_TIMES * message, *(n for n in in_layers if n <= 2 * (1 - LEAST_BUCKET) * limit_bytes)])
            self._room = -(-room // 2)
            limit, together = max(1, limit_bytes - self._room), self.table.together
            turns = turns_of(groups, senders=self._senders, limit_bytes=limit, together=together)
            self._turns = limit_bytes, turns
        return self._turns[1]

    def fill_bytes(self, turn: Turn) -> int:
        """Returns by how many bytes gathering exceeds the room that a bucket leaves for it.

        Positive if a parameter is larger than about half a bucket.
        """
        return max(0, *(_bytes_of(group, self._message_bytes) - self._room for group in turn.groups))

    @property
    def places(self) -> Hashable:
        """See `Outgoing`. None on a CPU, with adapters, which are merged for every sync, and if other ranks have
        shards, because gathering was never tried in a graph."""
        alone = len(self._tensor_ranks) == len(self._expert_ranks) == 1
        if self.device.type != "cuda" or self._model.adapter_scale is not None or not alone:
            return None
        held = {id(one.held.parameter): one.held.parameter for one in self._model.tensors.values() if one.held}
        return tuple(parameter.data_ptr() for parameter in held.values())

    def _tensor_groups(self) -> Iterator[TensorGroup]:
        for run in self.table.runs:
            groups = [run] if run[0].row.stacked else [(entry,) for entry in run]
            for entries in groups:
                first = self._model.tensors[entries[0].megatron]
                shapes = zip(entries[0].hf, entries[0].row.shapes, strict=True)
                lead = (len(entries),) if entries[0].row.stacked else ()
                specs = tuple(Spec(name, (*lead, *shape), self._wanted(first)) for name, shape in shapes)
                yield TensorGroup(entries, specs, first.pp_rank)

    def _wanted(self, tensor: ShardedTensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and not tensor.entry.row.wide else tensor.dtype

    # --- one turn -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def tensors(self, turn: Turn) -> Iterator[tuple[str, Tensor]]:
        """Yields (HF name, full tensor) for a turn. Tensors can share memory with the parameters."""
        if turn.sender not in self._tensor_ranks and turn.sender not in self._expert_ranks:
            return
        for stacked, groups in groupby(turn.groups, lambda group: group.entries[0].row.stacked):
            if stacked:
                for group in groups:
                    yield from self._stacked(group, turn.sender)
            else:
                for message in self._messages([entry for group in groups for entry in group.entries]):
                    yield from self._full(message, turn.sender)
        wrong, self._wrong = self._wrong, None
        if isinstance(wrong, SlimeError):
            raise wrong
        if wrong is not None:
            raise WeightSyncError(f"gathering weights failed with {type(wrong).__name__}: {wrong}") from wrong

    def _kept(self, make: Callable[..., Iterable[tuple[str, Tensor]]], *given: Any) -> Iterator[tuple[str, Tensor]]:
        """Yields from `make` until it fails. `tensors` raises the error at the end of the turn."""
        try:
            yield from make(*given)
        except Exception as error:
            self._wrong = self._wrong or error

    @property
    def _message_bytes(self) -> int:
        return max(1, self._turns[0] // MESSAGES)

    def _messages(self, entries: Sequence[Entry]) -> Iterator[_Message]:
        held: list[ShardedTensor] = []
        size, key = 0, None
        for entry in entries:
            tensor, dtype = self._model.tensors[entry.megatron], self._wanted(self._model.tensors[entry.megatron])
            num_bytes = dtype.itemsize * sum(torch.Size(shape).numel() for shape in entry.row.shapes)
            of_experts = (entry.row.megatron, entry.layer, tensor.ep_rank) if entry.expert is not None else None
            own = dtype, of_experts
            if held and (own != key or size + num_bytes > self._message_bytes):
                yield _Message(tuple(held), self._wanted(held[0]))
                held, size = [], 0
            held.append(tensor)
            size, key = size + num_bytes, own
        if held:
            yield _Message(tuple(held), self._wanted(held[0]))

    def _full(self, message: _Message, sender: int) -> Iterator[tuple[str, Tensor]]:
        if message.expert:
            stack = self._stack_at(message, sender)
            if stack is not None:
                yield from self._kept(export_stack, [tensor.entry for tensor in message.tensors], stack)
            return
        shards = self._shards_at(message, sender)
        for tensor in message.tensors if shards else ():
            yield from self._kept(export, self.table, tensor.name, shards.pop(0))

    def _stacked(self, group: TensorGroup, sender: int) -> Iterator[tuple[str, Tensor]]:
        whole: dict[str, Tensor] = {}
        for message in self._messages(group.entries):
            stack = self._stack_at(message, sender)
            if stack is None:
                continue
            entries = [tensor.entry for tensor in message.tensors]
            if len(entries) == len(group.entries):
                yield from self._kept(export_stack, entries, stack)
                return
            for _ in self._kept(_placed, whole, stack, group, entries):
                pass
        yield from whole.items() if self._wrong is None else ()

    # --- exchange between ranks ---------------------------------------------------------------------------------------

    def _own(self, tensor: ShardedTensor, dtype: torch.dtype) -> Tensor:
        return self._model.merged(tensor).detach().to(dtype)

    def _shards_at(self, message: _Message, sender: int) -> list[list[Tensor]]:
        """Returns each parameter's shards in rank order on the sender, and [] on other ranks."""
        if sender not in self._tensor_ranks:
            return []
        split = [tensor for tensor in message.tensors if tensor.tp_size > 1]
        gathered = self._gather([self._own(tensor, message.dtype) for tensor in split], sender) if split else []
        if self._rank != sender:
            return []
        rows = iter(zip(*gathered, strict=True))
        return [
            list(next(rows)) if tensor.tp_size > 1 else [self._own(tensor, message.dtype)] for tensor in message.tensors
        ]

    def _gather(self, shards: Sequence[Tensor], sender: int) -> list[list[Tensor]]:
        group = mpu.get_tensor_model_parallel_group()
        mine = _end_to_end(shards)
        of_ranks = None
        if self._rank == sender:  # contiguous, so that the shards of a single parameter form one view
            of_ranks = list(mine.new_empty(group.size() * mine.numel()).split(mine.numel()))
        dist.gather(mine, of_ranks, dst=sender, group=group)
        return [_apart(flat, shards) for flat in of_ranks or ()]

    def _stack_at(self, message: _Message, sender: int) -> Tensor | None:
        """Returns a message's parameters [experts, *shape] on the sender, and None on other ranks."""
        if sender not in self._expert_ranks:
            return None
        holder = self._expert_ranks[message.tensors[0].ep_rank]
        if self._rank == holder:
            stack = self._own_stack(message)
            if holder == sender:
                return stack
            self._pass(dist.isend, stack, sender)
        elif self._rank == sender:
            first = message.tensors[0]
            stack = torch.empty((len(message.tensors), *first.shape), dtype=message.dtype, device=self.device)
            self._pass(dist.irecv, stack, holder)
            return stack
        return None

    def _own_stack(self, message: _Message) -> Tensor:
        """Returns this rank's stack: a view if no adapter is merged and the dtype does not change, otherwise a copy."""
        first, last = message.tensors[0], message.tensors[-1]
        adapted = any(self._model.adapter_of(tensor) is not None for tensor in message.tensors)
        if first.here.number is not None and not adapted and first.dtype == message.dtype:
            return first.here.parameter.detach()[first.here.number : (last.here.number or 0) + 1]
        return torch.stack([self._own(tensor, message.dtype) for tensor in message.tensors])

    def _pass(self, operation: Any, stack: Tensor, other: int) -> None:
        """Sends `stack` to, or receives it from, another expert-parallel rank. Batching even a single operation avoids
        an extra NCCL communicator for the pair."""
        group = mpu.get_expert_model_parallel_group()
        for work in dist.batch_isend_irecv([dist.P2POp(operation, stack.contiguous(), other, group)]):
            work.wait()


def _senders(*, takes_turns: bool) -> list[list[int]]:
    """Returns the senders of each pipeline stage: its first rank, or that rank's whole expert group. Collective."""
    experts = dist.get_process_group_ranks(mpu.get_expert_model_parallel_group())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mpu.get_pipeline_model_parallel_rank(), experts))
    first: dict[int, list[int]] = {}
    for rank, (stage, group) in enumerate(everyone):
        first.setdefault(stage, list(group) if takes_turns else [rank])
    return [first[stage] for stage in range(mpu.get_pipeline_model_parallel_world_size())]


def _bytes_of(group: TensorGroup, message_bytes: int) -> int:
    """Returns the peak memory of gathering `group`, in bytes."""
    if group.entries[0].row.stacked:  # all experts of a layer, combined message by message
        return group.num_bytes + MESSAGE_TIMES * message_bytes
    return max(MESSAGE_TIMES * message_bytes, int(PARAMETER_TIMES * group.num_bytes))


def _placed(
    whole: dict[str, Tensor], stack: Tensor, group: TensorGroup, entries: Sequence[Entry]
) -> Iterator[tuple[str, Tensor]]:
    """Copies some experts into `whole`, which will contain all experts of the group."""
    first = entries[0].expert
    assert first is not None, f"{entries[0].megatron} has no expert number"
    for name, part in export_stack(entries, stack):
        if name not in whole:
            whole[name] = part.new_empty((len(group.entries), *part.shape[1:]))
        whole[name][first : first + len(part)] = part
        yield name, part


def _end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    flats = [tensor.reshape(-1) for tensor in tensors]
    return flats[0].contiguous() if len(flats) == 1 else torch.cat(flats)


def _apart(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
