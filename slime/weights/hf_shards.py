"""Converts HF tensors to Megatron tensor-parallel shards and back, bitwise exactly. Uses torch only, no engine.

The HF tensors of a row, concatenated along the split dimension, consist of segments. Rank r of n holds the r-th of n
equal parts of each segment. Within the shard, Megatron interleaves the segments in groups. The row gives the number of
groups: one per KV head (`[q..., k, v]`), or a single one (`[gate; up]`). Vocabulary rows may be padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from slime.core.errors import CheckpointError, ConfigError
from slime.models.common.table import Entry, FamilyTable, ModelSizes, Row, Unit


def byte_runs(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns the bytes of `tensors` in order, as flat uint8 views. Tensors that are adjacent in memory share one view.

    A model has thousands of experts, and the experts of a layer are views of one parameter. One operation per expert
    would take longer than copying the bytes. A tensor that is not contiguous is copied.
    """
    runs: list[tuple[torch.UntypedStorage, int, int]] = []  # storage, first byte, end
    for tensor in tensors:
        whole = tensor.detach().contiguous()
        storage = whole.untyped_storage()
        start = int(whole.storage_offset()) * whole.element_size()
        end = start + whole.numel() * whole.element_size()
        if runs and runs[-1][2] == start and runs[-1][0].data_ptr() == storage.data_ptr():
            start = runs.pop()[1]
        runs.append((storage, start, end))
    return [_bytes_of(*run) for run in runs]


def _bytes_of(storage: torch.UntypedStorage, start: int, end: int) -> Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, start, (end - start,))  # type: ignore[call-overload]


ReadHF = Callable[[str], Tensor]
"""A function from the name of an HF tensor to the full tensor."""


def load_shard(
    table: FamilyTable, megatron_name: str, read_hf: ReadHF, *, tp_rank: int, tp_size: int, vocab_multiple: int = 1
) -> Tensor:
    """Returns the shard of a Megatron parameter that rank `tp_rank` holds, in the dtype of the checkpoint.

    The shard may be a view of the tensor from `read_hf`; only this rank's part is read. For an expert, rank and size
    refer to the experts' own tensor-parallel group. Vocabulary rows are padded with zeros to a multiple of
    `vocab_multiple * tp_size`, as Megatron does.

    Raises `CheckpointError` if a tensor does not have the shape that the config implies, `ConfigError` if it cannot be
    split evenly.
    """
    assert 0 <= tp_rank < tp_size, f"tp_rank {tp_rank} of {tp_size}"
    entry = table.entry(megatron_name)
    check_divisible(table, entry, tp_size)
    parts = [_checked(table, name, read_hf(name)) for name in entry.hf]
    if entry.row.stacked:
        parts = [part[entry.expert] for part in parts]
    dim = entry.row.dim
    if dim is None:
        return parts[0]
    own = []
    for segment, unit in zip(segments_of(entry, parts), entry.row.units, strict=True):
        size = segment.shape[dim]
        if unit is Unit.VOCAB:
            size += -size % (vocab_multiple * tp_size)
        share = size // tp_size
        own.append(padded_slice(segment, dim, tp_rank * share, share))
    return _interleave(own, dim, entry.row.groups // tp_size)


def export(table: FamilyTable, megatron_name: str, shards: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """Returns the HF tensors of a Megatron parameter from its shards in rank order (one is enough if replicated).

    The result is (HF name, full tensor) in the order of the row, contiguous, dtype unchanged, without vocabulary
    padding. If an HF tensor stacks all experts, the result has only this expert's part.
    """
    assert shards, f"no shard of {megatron_name}"
    entry = table.entry(megatron_name)
    row, dim = entry.row, entry.row.dim
    if dim is None:
        for rank, other in enumerate(shards[1:], 1):
            assert torch.equal(shards[0], other), (
                f"{megatron_name} is replicated but differs between TP ranks 0 and {rank}"
            )
        full = [shards[0].contiguous()]
    else:
        groups = row.groups or len(shards)
        sizes = [size // groups for size in row.segments]
        if row.units == (Unit.VOCAB,):
            segments = [_joined(shards, dim).narrow(dim, 0, row.segments[0])]
        else:
            parts = [_separate(shard, dim, sizes, groups // len(shards)) for shard in shards]
            segments = [_joined(part, dim) for part in zip(*parts, strict=True)]
        full = _tensors_of(entry, segments)
    for name, tensor, want in zip(entry.hf, full, row.shapes, strict=True):
        assert tuple(tensor.shape) == want, (
            f"{megatron_name} exports {name} as {tuple(tensor.shape)}, config implies {want}"
        )
    return list(zip(entry.hf, full, strict=True))


def export_stack(entries: Sequence[Entry], stack: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Exports all experts, one after the other, from their `stack` [experts, *shape of a parameter].

    One operation makes the views of all experts, which is faster than one per expert. HF tensors that stack all experts
    are not split.
    """
    row = entries[0].row
    assert row.groups <= 1, f"{row.megatron} is interleaved"
    parts = [stack]
    if row.dim is not None:
        parts = list(stack.split([shape[row.dim] for shape in row.shapes], row.dim + 1))
    for name, part, want in zip(row.hf, parts, row.shapes, strict=True):
        assert part.shape == (len(entries), *want), (
            f"{name} of all experts is {tuple(part.shape)}, config implies {want}"
        )
    if row.stacked:
        yield from ((name, part.contiguous()) for name, part in zip(entries[0].hf, parts, strict=True))
        return
    for entry, *tensors in zip(entries, *(part.unbind() for part in parts), strict=True):
        for name, tensor in zip(entry.hf, tensors, strict=True):
            yield name, tensor.contiguous()


def by_segments(row: Row, shard: Tensor, num_shards: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Applies `change`, which keeps shapes, to this shard's part of each segment.

    `shard`: one of `num_shards` shards of a row's parameter [*shape], or several stacked ones [n, *shape]. A part is a
    contiguous range of the segment, in the layout of the HF tensors. A row that is not split has one part.
    """
    if row.dim is None:
        return change(shard)
    dim, groups = row.dim + shard.ndim - len(row.shapes[0]), row.groups or num_shards
    own = groups // num_shards
    parts = _separate(shard, dim, [size // groups for size in row.segments], own)
    return _interleave([change(part) for part in parts], dim, own)


def check_divisible(table: FamilyTable, entry: Entry, tp_size: int) -> None:
    """Raises `ConfigError` if the trainer cannot split `entry` into `tp_size` equal shards."""
    row = entry.row
    counts = [(unit_count(table.sizes, u, size), u.value) for size, u in zip(row.segments, row.units, strict=False)]
    counts += [(row.groups, "groups")] if row.groups else []
    for count, what in counts:
        if what != Unit.VOCAB.value and count % tp_size:
            raise ConfigError(
                f"tensor_model_parallel_size={tp_size} does not divide the {count} {what} of {entry.megatron}; choose "
                f"a divisor of {count}"
            )


def unit_count(sizes: ModelSizes, unit: Unit, size: int) -> int:
    """Returns the number of units (heads or single rows) in a segment of `size`."""
    return {Unit.HEADS: sizes.num_heads, Unit.KV_HEADS: sizes.num_kv_heads}.get(unit, size)


def segments_of(entry: Entry, parts: Sequence[Tensor]) -> list[Tensor]:
    """Returns views of the segments of a row's full HF tensors."""
    dim = entry.row.dim
    assert dim is not None, f"{entry.megatron} is not split"
    out: list[Tensor] = []
    sizes = list(entry.row.segments)
    for part in parts:
        taken, rest = [], part.shape[dim]
        while rest > 0:
            taken.append(sizes.pop(0))
            rest -= taken[-1]
        out += part.split(taken, dim)
    return out


def slice_shards(tensor: Tensor, dim: int, start: int, size: int) -> list[Tensor]:
    """Returns `size` entries from `start` along `dim`: a view, then zeros for entries beyond the end."""
    first = min(start, tensor.shape[dim])
    real = tensor.narrow(dim, first, min(size, tensor.shape[dim] - first))
    missing = list(real.shape)
    missing[dim] = size - real.shape[dim]
    return [real, real.new_zeros(missing)] if missing[dim] else [real]


def padded_slice(tensor: Tensor, dim: int, start: int, size: int) -> Tensor:
    """Returns the result of `slice_shards` as one tensor, which is a view if it needs no zeros."""
    return _joined(slice_shards(tensor, dim, start, size), dim)


def _tensors_of(entry: Entry, segments: Sequence[Tensor]) -> list[Tensor]:
    """Inverts `segments_of`. The tensors are contiguous."""
    dim, left, out = entry.row.dim, list(segments), []
    assert dim is not None, f"{entry.megatron} is not split"
    for shape in entry.row.shapes:
        taken: list[Tensor] = []
        while sum(t.shape[dim] for t in taken) < shape[dim]:
            taken.append(left.pop(0))
        out.append(_joined(taken, dim).contiguous())
    return out


def _interleave(segments: Sequence[Tensor], dim: int, groups: int) -> Tensor:
    """Interleaves the segments of one rank in `groups` groups."""
    if groups <= 1 or len(segments) == 1:
        return _joined(segments, dim)
    return torch.cat([s.unflatten(dim, (groups, -1)) for s in segments], dim + 1).flatten(dim, dim + 1)


def _separate(shard: Tensor, dim: int, sizes: Sequence[int], groups: int) -> list[Tensor]:
    """Inverts `_interleave`. `sizes`: length of each segment in one group."""
    if groups <= 1 or len(sizes) == 1:
        return list(shard.split([size * max(groups, 1) for size in sizes], dim))
    parts = shard.unflatten(dim, (groups, -1)).split(list(sizes), dim + 1)
    return [part.flatten(dim, dim + 1) for part in parts]


def _checked(table: FamilyTable, hf_name: str, tensor: Tensor) -> Tensor:
    want = table.shape_of(hf_name)
    if tuple(tensor.shape) != want:
        raise CheckpointError(
            f"{hf_name} has the shape {list(tensor.shape)}, but config.json implies {list(want)}; use the "
            "config.json that belongs to this checkpoint"
        )
    return tensor


def _joined(shards: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenates shards. The result is a view if the shards are adjacent in memory."""
    first = shards[0]
    if len(shards) == 1:
        return first
    if dim == 0 and all(shard.is_contiguous() for shard in shards) and len(byte_runs(shards)) == 1:
        shape = (sum(shard.shape[0] for shard in shards), *first.shape[1:])
        return first.as_strided(shape, first.stride())
    return torch.cat(list(shards), dim)
