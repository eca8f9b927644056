"""Builds an SGLang rank's tensors from full HF tensors (fused, sharded and padded) and computes their digests.

The trainer computes these digests from its own tensors before sending them. If the engine reports the same digests,
then names, fusing, sharding, padding, dtypes and all transferred bits are correct. `holding` decides which shards a
rank holds; this module computes their contents.

SGLang 0.5.16 follows these rules (`layers/linear.py`, `layers/vocab_parallel_embedding.py`,
`configs/update_config.py`):
- q, k and v are stacked within each rank's shard, and so are gate and up; a tied output layer has no tensor of its own;
- the vocabulary is padded with zero rows to a multiple of 64. If the number of ranks does not divide the result, the
  multiple is 64 times the number of ranks;
- the experts of a layer are stacked, each as a shard of [gate; up]; the down projections are stacked too;
- on a GPU, fewer KV heads than ranks are replicated;
- on a CPU, KV heads (and query heads with them) are padded with zeros to a multiple of the number of ranks, and MLP
  features to a multiple of 32 times the number of ranks.

Invariants
1. Ranks that hold the same bytes share one digest, even across engines; it is computed only once.
2. A resident tensor is never assembled in memory. If HF tensors arrive in table order, only the tensors of one
   parameter (one expert) are kept, plus up to `UNREAD_BYTES` that are hashed together on a GPU.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slime.core.engine_interface import Digest, Hasher
from slime.core.errors import ConfigError, WeightSyncError
from slime.core.text import listed
from slime.core.topology import EngineLayout, EngineRank
from slime.models.common.table import Entry, FamilyTable, ModelSizes, Unit
from slime.weights.hf_shards import padded_slice, segments_of, slice_shards, unit_count
from slime.weights.holding import Holding, Share, holdings

VOCAB_PADDING = 64
"""SGLang pads vocabularies to a multiple of this number."""
UNREAD_BYTES = 64 * 2**20
"""Number of bytes that hashers may buffer before hashing them."""
CPU_MLP_PADDING = 32
"""On a CPU, SGLang pads each rank's share of MLP features to a multiple of this number."""


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Returns the padded number of embedding rows, summed over all ranks of an engine."""
    multiple = VOCAB_PADDING
    if _up(vocab_size, multiple) % tp_size:
        multiple *= tp_size
    return _up(vocab_size, multiple)


def engine_shards(
    table: FamilyTable, entry: Entry, parts: Sequence[Tensor], share: Share, *, on_cpu: bool
) -> list[Tensor]:
    """Returns the shards of `entry` on a rank with this share, which the engine stacks along dim 0.

    `parts`: the full HF tensors in row order. The shards are views where possible, because copying takes longer than
    hashing. Raises `ConfigError` if the engine cannot split the tensor evenly.
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


def holds_unchanged(table: FamilyTable, held: Sequence[Entry], share: Share, *, on_cpu: bool) -> bool:
    """Returns whether a rank with this share stores the entries' HF tensors unmodified and back to back."""
    for entry in {id(e.row): e for e in held}.values():
        row = entry.row
        if row.stacked or row.transposed or (row.dim is not None and share.parts > 1):
            return False
        columns = bool(row.dim) and len(row.segments) > len(row.hf)  # the engine stacks segments in a different order
        lengths = zip(row.units, row.segments, strict=False)
        padded = any(_split(table.sizes, entry, unit, size, share, on_cpu)[0] != size for unit, size in lengths)
        if columns or padded:
            return False
    return True


def _split(sizes: ModelSizes, entry: Entry, unit: Unit, size: int, share: Share, on_cpu: bool) -> tuple[int, int, int]:
    """Returns a segment's padded length over all ranks, this rank's shard index, and the number of distinct shards."""
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
            num_ranks = min(kv_heads, share.parts)  # fewer heads than ranks: neighbouring ranks hold the same head
        uneven = count % num_ranks or share.parts % num_ranks or size % num_ranks  # scales are per block of heads
    else:
        uneven = size % share.parts
    if uneven:
        raise ConfigError(
            f"an engine of {share.parts} ranks cannot split the {size} {unit.value} of {entry.engine} evenly"
        )
    return size, share.part * num_ranks // share.parts, num_ranks


def _up(size: int, multiple: int) -> int:
    return size + -size % multiple


Expected = str | tuple[str, str]
"""The digest that an engine must report. For a `Row.widened` tensor, either of two digests of the same values: in the
dtype that is sent, or in float32."""
Digests = Mapping[EngineLayout, Mapping[EngineRank, Mapping[str, Expected]]]
"""Maps layout -> rank -> resident name -> expected digest."""


_Place = tuple[EngineLayout, EngineRank, str, Holding]
_Places = tuple[tuple[_Place, ...], Mapping[Holding, bool]]


def _places(table: FamilyTable, layouts: tuple[EngineLayout, ...], name: str, on_cpu: bool) -> _Places:
    """Returns the ranks that hold a shard of a resident tensor, and which holdings are unmodified HF tensors.

    Cached on the table, because every weight sync needs the result for every tensor.
    """
    known: dict[Any, _Places] = vars(table).setdefault("_slime_places", {})
    if (found := known.get((layouts, name, on_cpu))) is not None:
        return found
    held = table.resident[name]
    places = tuple((layout, *place) for layout in layouts for place in holdings(table, held, layout))
    unchanged: dict[Holding, bool] = {}
    for *_, holding in places:
        if holding not in unchanged:
            unchanged[holding] = holds_unchanged(table, holding.entries(held), holding.share, on_cpu=on_cpu)
    return known.setdefault((layouts, name, on_cpu), (places, unchanged))


@dataclass(slots=True)
class _Resident:
    """A resident tensor that has not received all of its entries yet."""

    held: Sequence[Entry]
    """The entries, in stacking order."""
    parts: dict[Holding, tuple[Hasher, bool]]
    """Maps each holding to its hasher and to whether the rank stores the HF tensors unmodified."""
    places: Sequence[_Place]
    """The ranks that hold a shard of the tensor, with the resident name and the holding of each."""
    waiting: dict[str, Tensor] = field(default_factory=dict)
    """HF tensors of incomplete entries."""
    num_taken: int = 0
    """Number of entries that have been hashed."""
    widened: Hasher | None = None
    """Hashes the tensor in float32 if it is `Row.widened` and sent in another dtype."""

    @property
    def hashers(self) -> list[Hasher]:
        """The hasher of each holding in order, and `widened` if there is one."""
        return [hasher for hasher, _ in self.parts.values()] + ([self.widened] if self.widened else [])


def require_all(hf_names: Iterable[str], sent: Container[str]) -> None:
    """Raises `WeightSyncError` if any of `hf_names` is not in `sent`."""
    missing = [name for name in hf_names if name not in sent]
    if missing:
        raise WeightSyncError(f"the weight sync did not send {listed(missing)}; every tensor must be sent")


class ExpectedDigests:
    """Computes digests of resident tensors from a stream of HF tensors. Assumes the same device type on both sides."""

    def __init__(self, table: FamilyTable, layouts: Iterable[EngineLayout], digest: Digest) -> None:
        self._table, self._digest = table, digest
        self._layouts = tuple(dict.fromkeys(layouts))
        self._open: dict[str, _Resident] = {}
        self._complete: list[_Resident] = []
        self._sums: dict[str, Hasher] = {}
        """Hashers of tensors that the engine derives by adding one."""
        self._seen: set[str] = set()
        self._unread_bytes = 0
        self._unread: list[Hasher] = []
        """Hashers of complete tensors with parts that have not been read."""

    def add(self, hf_name: str, tensor: Tensor) -> None:
        """Adds one full HF tensor. Raises `WeightSyncError` if it is unknown, a duplicate, or has the wrong shape."""
        want = self._table.shape_of(hf_name)
        if hf_name in self._seen:
            raise WeightSyncError(f"{hf_name} was sent twice in one weight sync; each tensor must be sent once")
        if tuple(tensor.shape) != want:
            raise WeightSyncError(f"{hf_name} has shape {tuple(tensor.shape)}, expected {want}")
        self._seen.add(hf_name)
        name = self._table.resident_of[hf_name]
        resident = self._open.get(name)
        if resident is None:
            resident = self._open[name] = self._begin(name, on_cpu=not tensor.is_cuda)
        resident.waiting[hf_name] = tensor.detach()
        self._take(resident)
        self._unread_bytes += tensor.nbytes
        if resident.num_taken == len(resident.held):
            self._complete.append(self._open.pop(name))
            self._unread += resident.hashers
        if self._unread_bytes >= UNREAD_BYTES:
            self.read()

    def read(self) -> None:
        """Hashes the tensors that were added. Call it before their memory changes."""
        self._digest.read([*self._unread, *(hasher for one in self._open.values() for hasher in one.hashers)])
        self._unread_bytes = 0
        self._unread.clear()

    def recording(self, device: torch.device) -> AbstractContextManager[object]:
        """See `Digest.recording`."""
        return self._digest.recording(device)

    @property
    def is_complete(self) -> bool:
        """Whether no engine tensor waits for more of its HF tensors."""
        return not self._open

    def _begin(self, name: str, *, on_cpu: bool) -> _Resident:
        held = self._table.resident[name]
        places, unchanged = _places(self._table, self._layouts, name, on_cpu)
        return _Resident(held, {one: (self._digest.begin(), same) for one, same in unchanged.items()}, places)

    def _take(self, resident: _Resident) -> None:
        """Hashes all complete entries, in stacking order."""
        held, waiting = resident.held, resident.waiting
        while resident.num_taken < len(held):
            number, entry = resident.num_taken, held[resident.num_taken]
            if any(name not in waiting for name in entry.hf):
                return
            tensors = [waiting[name] for name in entry.hf]
            for holding, (hasher, unchanged) in resident.parts.items():
                if holding.experts is None or number in holding.experts:
                    hasher.add(tensors if unchanged else self._shards(entry, tensors, holding))
            if entry.row.widened and resident.parts and tensors[0].dtype != torch.float32:
                assert len(held) == 1 and entry.row.dim is None, f"{entry.engine} is widened, so it must be whole"
                resident.widened = self._digest.begin()
                resident.widened.add([tensors[0].float()])
            if entry.plus_one and resident.parts:
                self._sums[entry.plus_one] = self._digest.begin()
                self._sums[entry.plus_one].add([tensors[0] + 1.0])
            resident.num_taken += 1
            following = held[resident.num_taken].hf if resident.num_taken < len(held) else ()
            for name in entry.hf:
                if name not in following:  # experts can share HF tensors
                    waiting.pop(name, None)

    def _shards(self, entry: Entry, tensors: Sequence[Tensor], holding: Holding) -> list[Tensor]:
        return engine_shards(self._table, entry, tensors, holding.share, on_cpu=not tensors[0].is_cuda)

    def finish(self, hf_names: Iterable[str] | None = None) -> Digests:
        """Returns the digests for `hf_names` (default: all). Raises `WeightSyncError` if a tensor was not added."""
        require_all(self._table.hf_names if hf_names is None else hf_names, self._seen)
        assert not self._open, f"incomplete: {sorted(self._open)[:8]}"
        digests: dict[EngineLayout, dict[EngineRank, dict[str, Expected]]] = {}
        hashers = [hasher for resident in self._complete for hasher in resident.hashers]
        found_all = self._digest.finish([*hashers, *self._sums.values()])
        of_sums = dict(zip(self._sums, found_all[len(hashers) :], strict=True))
        finished = iter(found_all)
        for resident in self._complete:
            found: dict[Holding, Expected] = dict(zip(resident.parts, finished, strict=False))
            if resident.widened:
                wide = next(finished)
                found = {holding: (str(digest), wide) for holding, digest in found.items()}
            sums = [entry.plus_one for entry in resident.held if entry.plus_one]
            for layout, rank, name, holding in resident.places:
                of_rank = digests.setdefault(layout, {}).setdefault(rank, {})
                of_rank[name] = found[holding]
                of_rank.update({name: of_sums[name] for name in sums})
        return digests


def merged(parts: Iterable[Digests]) -> Digests:
    """Merges the digests of several senders, each of which sent different tensors."""
    out: dict[EngineLayout, dict[EngineRank, dict[str, Expected]]] = {}
    for part in parts:
        for layout, ranks in part.items():
            for rank, digests in ranks.items():
                out.setdefault(layout, {}).setdefault(rank, {}).update(digests)
    return out
