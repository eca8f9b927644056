"""What one SGLang rank holds of the full HF tensors: fused, sharded, padded; and the digests of exactly that.

The trainer computes these digests on its own tensors before they travel, so that equality with what the engine reports
afterwards covers names, fusing, sharding, padding, dtype and every bit on the way. Which part a rank holds stands in
`holding`; here is what the part looks like.

Rules, of SGLang 0.5.16 (`layers/linear.py`, `layers/vocab_parallel_embedding.py`, `configs/update_config.py`):
- q, k, v are stacked within each rank's shard, and so are gate and up; a tied head is not resident;
- the vocabulary is padded with zero rows to a multiple of 64 (times the ranks, where 64 does not divide evenly);
- the experts of a layer are stacked, [gate; up] of each within its shard, and so are their down projections;
- on a GPU, fewer KV heads than ranks are replicated;
- on a CPU, KV heads are padded with zero heads to a multiple of the ranks (and query heads with them), the MLP with
  zero features to a multiple of 32 times the ranks.

Invariants
1. Ranks that hold the same bytes share one digest, whatever engines they belong to: it is computed once.
2. Where tensors come in table order, one incomplete resident tensor is kept at a time: never a second copy of the
   model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from slime.core.errors import ConfigError, WeightSyncError
from slime.core.layout import EngineLayout, EngineRank
from slime.core.ports import Digest
from slime.models.common.table import Entry, FamilyTable, ModelSizes, Unit
from slime.weights.convert import padded_slice, segments_of, slice_shards, unit_count
from slime.weights.holding import Holding, Share, holdings

VOCAB_PADDING = 64
"""SGLang pads vocabularies to a multiple of this."""
CPU_MLP_PADDING = 32
"""On a CPU, SGLang pads each rank's share of MLP features to a multiple of this."""


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Rows of the embedding over all ranks of an engine."""
    multiple = VOCAB_PADDING
    if _up(vocab_size, multiple) % tp_size:
        multiple *= tp_size
    return _up(vocab_size, multiple)


def engine_shards(
    table: FamilyTable, entry: Entry, parts: Sequence[Tensor], share: Share, *, on_cpu: bool
) -> list[Tensor]:
    """What a rank with this share holds of `entry`, as shards to be stacked along dim 0 (mostly views: joining them
    would cost more than their digest). `parts` are the full HF tensors in the order of the row.

    Raises `ConfigError` if the engine cannot split the tensor evenly.
    """
    if entry.row.stacked:
        parts = [part[entry.expert] for part in parts]
    dim = entry.row.dim
    if dim is None:
        return list(parts)
    shards: list[Tensor] = []
    for segment, unit in zip(segments_of(entry, parts), entry.row.units, strict=True):
        size, rank, num_ranks = _split(table.sizes, entry, unit, segment.shape[dim], share, on_cpu)
        each = size // num_ranks
        own = rank * each, each
        shards += slice_shards(segment, 0, *own) if dim == 0 else [padded_slice(segment, dim, *own)]
    return [torch.cat(shards).t().contiguous()] if entry.row.transposed else shards


def held_as_given(table: FamilyTable, held: Sequence[Entry], share: Share, *, on_cpu: bool) -> bool:
    """Whether a rank with this share holds the HF tensors of these entries end to end, as they are."""
    for entry in {id(e.row): e for e in held}.values():
        row = entry.row
        if row.stacked or row.transposed or (row.dim is not None and share.parts > 1):
            return False
        columns = bool(row.dim) and len(row.segments) > len(row.hf)  # they would be stacked in another order
        lengths = zip(row.units, row.segments, strict=False)
        padded = any(_split(table.sizes, entry, unit, size, share, on_cpu)[0] != size for unit, size in lengths)
        if columns or padded:
            return False
    return True


def _split(sizes: ModelSizes, entry: Entry, unit: Unit, size: int, share: Share, on_cpu: bool) -> tuple[int, int, int]:
    """(padded length over all ranks, rank, number of ranks that differ) of a segment."""
    if unit is Unit.VOCAB:
        return padded_vocab_size(size, share.parts), share.part, share.parts
    if unit is Unit.FEATURES and on_cpu:
        return _up(size, CPU_MLP_PADDING * share.padded_for), share.part, share.parts
    num_ranks = share.parts
    if unit in (Unit.HEADS, Unit.KV_HEADS):
        kv_heads = _up(sizes.num_kv_heads, share.padded_for) if on_cpu else sizes.num_kv_heads
        count = kv_heads * (sizes.heads_per_group if unit is Unit.HEADS else 1)
        if kv_heads != sizes.num_kv_heads:
            size = size // unit_count(sizes, unit, size) * count
        if unit is Unit.KV_HEADS:
            num_ranks = min(kv_heads, share.parts)  # fewer than ranks: neighbours hold the same head
        uneven = count % num_ranks or share.parts % num_ranks or size % num_ranks  # scales come in blocks of heads
    else:
        uneven = size % share.parts
    if uneven:
        raise ConfigError(f"got an engine of {share.parts} ranks for {entry.engine} with {size} {unit.value}; uneven")
    return size, share.part * num_ranks // share.parts, num_ranks


def _up(size: int, multiple: int) -> int:
    return size + -size % multiple


class ExpectedDigests:
    """Digests of every resident tensor, on engines of the same kind of device, built while HF tensors stream by."""

    def __init__(self, table: FamilyTable, layouts: Iterable[EngineLayout], digest: Digest) -> None:
        self._table, self._digest = table, digest
        self._digests: dict[EngineLayout, dict[EngineRank, dict[str, str]]] = {
            layout: {rank: {} for rank in layout.ranks()} for layout in layouts
        }
        self._waiting: dict[str, dict[str, Tensor]] = {}
        self._num_parts = {name: len({n for e in held for n in e.hf}) for name, held in table.resident.items()}
        self._seen: set[str] = set()

    def add(self, hf_name: str, tensor: Tensor) -> None:
        """Takes one full HF tensor. Raises `WeightSyncError` for one that is unknown, doubled or of a wrong shape."""
        want = self._table.shape_of(hf_name)
        if hf_name in self._seen:
            raise WeightSyncError(f"got {hf_name} twice in one weight sync; each tensor may be sent once")
        if tuple(tensor.shape) != want:
            raise WeightSyncError(f"got {hf_name} of shape {tuple(tensor.shape)}; want {want}")
        self._seen.add(hf_name)
        name = self._table.resident_of[hf_name]
        waiting = self._waiting.setdefault(name, {})
        waiting[hf_name] = tensor.detach()
        if len(waiting) == self._num_parts[name]:
            del self._waiting[name]
            self._complete(self._table.resident[name], waiting)

    def _complete(self, held: Sequence[Entry], state: Mapping[str, Tensor]) -> None:
        on_cpu = not state[held[0].hf[0]].is_cuda
        known: dict[Holding, str] = {}
        sums: dict[str, str] = {}
        for layout, ranks in self._digests.items():
            for rank, name, holding in holdings(self._table, held, layout):
                if holding not in known:
                    known[holding] = self._digest(self._held(holding, held, state, on_cpu=on_cpu))
                    sums = sums or {e.plus_one: self._digest([state[e.hf[0]] + 1.0]) for e in held if e.plus_one}
                ranks[rank].update(sums)
                ranks[rank][name] = known[holding]

    def _held(
        self, holding: Holding, held: Sequence[Entry], state: Mapping[str, Tensor], *, on_cpu: bool
    ) -> list[Tensor]:
        """What is to be stacked along dim 0: the tensors of the entries as they are, or their shards in order."""
        entries = holding.entries(held)
        if held_as_given(self._table, entries, holding.share, on_cpu=on_cpu):
            return [state[name] for e in entries for name in e.hf]
        return [
            shard
            for entry in entries
            for shard in engine_shards(self._table, entry, [state[n] for n in entry.hf], holding.share, on_cpu=on_cpu)
        ]

    def finish(self) -> Mapping[EngineLayout, Mapping[EngineRank, Mapping[str, str]]]:
        """Layout -> rank -> resident name -> digest. Raises `WeightSyncError` if tensors are missing."""
        missing = [name for name in self._table.hf_names if name not in self._seen]
        if missing:
            raise WeightSyncError(
                f"got a weight sync without {missing[:8]} ({len(missing)} missing); send every tensor"
            )
        return self._digests
