"""Converts between HF tensors and Megatron tensor-parallel shards, bit for bit. Needs only torch.

The HF tensors of a row are concatenated along the split dimension and divided into segments. Each segment is split into
n equal slices, and rank r holds slice r. Within a shard, Megatron interleaves the segments in groups. The row specifies
the number of groups: one per KV head for `[q..., k, v]`, or one for `[gate; up]`. The vocabulary may be zero-padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from slime.core.errors import CheckpointError, ConfigError
from slime.models.common.table import Entry, FamilyTable, ModelSizes, Row, Unit


def byte_runs(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns the bytes of `tensors` in order, as flat uint8 views. Adjacent tensors share one view.

    A model has thousands of experts, all views of one parameter per layer, and launching one operation per expert would
    take longer than the copy itself. A non-contiguous tensor is copied first.
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
"""Maps an HF tensor's name to the full tensor."""


def load_shard(
    table: FamilyTable, megatron_name: str, read_hf: ReadHF, *, tp_rank: int, tp_size: int, vocab_multiple: int = 1
) -> Tensor:
    """Returns rank `tp_rank`'s shard of a Megatron parameter, in the checkpoint's dtype.

    The shard may be a view of the tensor that `read_hf` returned, and only this rank's slice is read. For experts, rank
    and size refer to the expert tensor-parallel group. As in Megatron, vocabulary rows are zero-padded to a multiple of
    `vocab_multiple * tp_size`.

    Raises `CheckpointError` if a tensor's shape differs from the one in the config, and `ConfigError` if it cannot be
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
    """Reassembles the HF tensors of a Megatron parameter from its shards in rank order (one if replicated).

    Returns (HF name, full tensor) pairs in row order. The tensors are contiguous, keep their dtype and have no
    vocabulary padding. If an HF tensor stacks all experts, only this expert's slice is returned.
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
    """Yields the HF tensors of all experts in order. `stack` [experts, *parameter shape]: the stacked parameters.

    Splits the whole stack at once, which is faster than one operation per expert. HF tensors that stack all experts are
    yielded unsplit.
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
    """Applies `change`, which must preserve shapes, to this shard's slice of each segment.

    `shard`: one of `num_shards` shards of a row's parameter [*shape], or a stack of n such shards [n, *shape]. Each
    slice is a contiguous range of the segment in HF layout. A replicated row is passed as a single slice.
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
    """Returns the number of units (heads, or else single rows) in a segment of length `size`."""
    return {Unit.HEADS: sizes.num_heads, Unit.KV_HEADS: sizes.num_kv_heads}.get(unit, size)


def segments_of(entry: Entry, parts: Sequence[Tensor]) -> list[Tensor]:
    """Splits a row's full HF tensors into views of their segments."""
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
    """Returns `size` entries from `start` along `dim` as a view, followed by zeros if the range exceeds the tensor."""
    first = min(start, tensor.shape[dim])
    real = tensor.narrow(dim, first, min(size, tensor.shape[dim] - first))
    missing = list(real.shape)
    missing[dim] = size - real.shape[dim]
    return [real, real.new_zeros(missing)] if missing[dim] else [real]


def padded_slice(tensor: Tensor, dim: int, start: int, size: int) -> Tensor:
    """Like `slice_shards`, but returns one tensor: a view unless padding is needed."""
    return _joined(slice_shards(tensor, dim, start, size), dim)


def _tensors_of(entry: Entry, segments: Sequence[Tensor]) -> list[Tensor]:
    """Inverts `segments_of`. Returns contiguous tensors."""
    dim, left, out = entry.row.dim, list(segments), []
    assert dim is not None, f"{entry.megatron} is not split"
    for shape in entry.row.shapes:
        taken: list[Tensor] = []
        while sum(t.shape[dim] for t in taken) < shape[dim]:
            taken.append(left.pop(0))
        out.append(_joined(taken, dim).contiguous())
    return out


def _interleave(segments: Sequence[Tensor], dim: int, groups: int) -> Tensor:
    """Interleaves one rank's segments in `groups` groups."""
    if groups <= 1 or len(segments) == 1:
        return _joined(segments, dim)
    return torch.cat([s.unflatten(dim, (groups, -1)) for s in segments], dim + 1).flatten(dim, dim + 1)


def _separate(shard: Tensor, dim: int, sizes: Sequence[int], groups: int) -> list[Tensor]:
    """Inverts `_interleave`. `sizes`: length of each segment within a group."""
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
    """Concatenates shards; returns a view if they are adjacent in memory."""
    first = shards[0]
    if len(shards) == 1:
        return first
    if dim == 0 and all(shard.is_contiguous() for shard in shards) and len(byte_runs(shards)) == 1:
        shape = (sum(shard.shape[0] for shard in shards), *first.shape[1:])
        return first.as_strided(shape, first.stride())
    return torch.cat(list(shards), dim)
