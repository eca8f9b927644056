"""What one SGLang rank holds of the full HF tensors: fused, sharded, padded; and the digests of exactly that.

The trainer computes these digests on its own tensors before they travel, so that equality with what the engine reports
afterwards covers names, fusing, sharding, padding, dtype and every bit on the way.

Rules, of SGLang 0.5.16 (`layers/linear.py`, `layers/vocab_parallel_embedding.py`, `configs/update_config.py`):
- q, k, v are stacked within each rank's shard, and so are gate and up; a tied head is not resident;
- the vocabulary is padded with zero rows to a multiple of 64 (times the ranks, where 64 does not divide evenly);
- the experts of a layer are stacked, [gate; up] of each within its shard, and so are their down projections;
- on a GPU, fewer KV heads than ranks are replicated;
- on a CPU, KV heads are padded with zero heads to a multiple of the ranks (and query heads with them), the MLP with
  zero features to a multiple of 32 times the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from slime.core.errors import ConfigError, WeightSyncError
from slime.core.ports import Digest
from slime.weights.tables import Entry, FamilyTable, Kind, ModelShape

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


def engine_pieces(
    table: FamilyTable, entry: Entry, parts: Sequence[Tensor], *, tp_rank: int, tp_size: int, on_cpu: bool
) -> list[Tensor]:
    """What engine rank `tp_rank` holds of `entry`, as pieces to be stacked along dim 0 (mostly views: joining them
    would cost more than their digest). `parts` are the full HF tensors in the order of the row.

    Raises `ConfigError` if the engine cannot cut the tensor evenly.
    """
    if entry.kind is Kind.COPY:
        return [parts[0]]
    if entry.kind is Kind.QKV:
        return _qkv_pieces(table.shape, parts, tp_rank, tp_size, on_cpu)
    dim = 1 if entry.kind is Kind.ROW else 0
    size = _padded_size(table.shape, entry, parts[0].shape[dim], tp_size, on_cpu)
    return [piece for part in parts for piece in _piece(part, dim, size, tp_rank, tp_size)]


def _qkv_pieces(shape: ModelShape, parts: Sequence[Tensor], tp_rank: int, tp_size: int, on_cpu: bool) -> list[Tensor]:
    kv_heads, d = shape.num_kv_heads, shape.head_dim
    if on_cpu:
        kv_heads = _up(kv_heads, tp_size)
    heads = kv_heads * shape.heads_per_group
    if heads % tp_size or max(kv_heads, tp_size) % min(kv_heads, tp_size):
        raise ConfigError(f"got an engine of {tp_size} ranks for {heads} heads and {kv_heads} KV heads; uneven cut")
    kv_cuts = min(kv_heads, tp_size)  # fewer than ranks: neighbours hold the same head
    kv_rank = tp_rank * kv_cuts // tp_size
    cuts = (
        (parts[0], heads, tp_rank, tp_size),
        (parts[1], kv_heads, kv_rank, kv_cuts),
        (parts[2], kv_heads, kv_rank, kv_cuts),
    )
    return [piece for part, n, rank, num_ranks in cuts for piece in _piece(part, 0, n * d, rank, num_ranks)]


def _padded_size(shape: ModelShape, entry: Entry, size: int, tp_size: int, on_cpu: bool) -> int:
    """Length of the cut dimension over all ranks."""
    if entry.kind is Kind.VOCAB:
        return padded_vocab_size(size, tp_size)
    if on_cpu and entry.engine.endswith("o_proj.weight"):
        return _up(shape.num_kv_heads, tp_size) * shape.heads_per_group * shape.head_dim
    if on_cpu:
        return _up(size, CPU_MLP_PADDING * tp_size)
    if size % tp_size:
        raise ConfigError(f"got an engine of {tp_size} ranks for {entry.engine} with {size} features; uneven cut")
    return size


def _piece(tensor: Tensor, dim: int, padded_size: int, rank: int, num_ranks: int) -> list[Tensor]:
    """Rank's equal share of `tensor` along `dim` after padding with zeros to `padded_size`."""
    share = padded_size // num_ranks
    start = min(rank * share, tensor.shape[dim])
    real = tensor.narrow(dim, start, min(share, tensor.shape[dim] - start))
    zeros = list(real.shape)
    zeros[dim] = share - real.shape[dim]
    if not zeros[dim]:
        return [real]
    both = [real, real.new_zeros(zeros)]
    return both if dim == 0 else [torch.cat(both, dim)]


def _up(size: int, multiple: int) -> int:
    return size + -size % multiple


class ExpectedDigests:
    """Digests of every resident tensor, on engines of the same kind of device, built while HF tensors stream by.

    Holds at most one incomplete resident tensor when tensors come in table order (the largest: the experts of one
    layer), never a second copy of the model.
    """

    def __init__(self, table: FamilyTable, tp_sizes: Sequence[int], digest: Digest) -> None:
        self._table, self._digest = table, digest
        self._digests: dict[int, list[dict[str, str]]] = {n: [{} for _ in range(n)] for n in sorted(set(tp_sizes))}
        self._waiting: dict[str, dict[str, Tensor]] = {}
        self._seen: set[str] = set()

    def add(self, hf_name: str, tensor: Tensor) -> None:
        """Takes one full HF tensor. Raises `WeightSyncError` for one that is unknown, doubled or of a wrong shape."""
        entry = self._table.entry_of_hf(hf_name)
        if hf_name in self._seen:
            raise WeightSyncError(f"got {hf_name} twice in one publication; each tensor may be sent once")
        if tuple(tensor.shape) != self._table.hf_shape(hf_name):
            raise WeightSyncError(f"got {hf_name} of shape {tuple(tensor.shape)}; want {self._table.hf_shape(hf_name)}")
        self._seen.add(hf_name)
        waiting = self._waiting.setdefault(entry.engine, {})
        waiting[hf_name] = tensor.detach()
        held = self._table.resident[entry.engine]
        if len(waiting) == sum(len(e.hf) for e in held):
            del self._waiting[entry.engine]
            self._complete(held, waiting)

    def _complete(self, held: Sequence[Entry], state: Mapping[str, Tensor]) -> None:
        on_cpu = not state[held[0].hf[0]].is_cuda
        for tp_size, ranks in self._digests.items():
            same = self._digest([state[held[0].hf[0]]]) if held[0].kind is Kind.COPY else None
            for rank, digests in enumerate(ranks):
                digests[held[0].engine] = same or self._digest(
                    _stack(self._table, held, state, tp_rank=rank, tp_size=tp_size, on_cpu=on_cpu)
                )

    def finish(self) -> dict[int, list[dict[str, str]]]:
        """tp_size -> per rank, resident name -> digest. Raises `WeightSyncError` if tensors are missing."""
        missing = [name for name in self._table.hf_names if name not in self._seen]
        if missing:
            raise WeightSyncError(
                f"got a publication without {missing[:8]} ({len(missing)} missing); send every tensor"
            )
        return self._digests


def engine_tensors(
    table: FamilyTable, state: Mapping[str, Tensor], *, tp_rank: int, tp_size: int, on_cpu: bool
) -> Iterator[tuple[str, Tensor]]:
    """All resident tensors of one rank from a whole HF state dict (for tests and tools); experts come stacked flat."""
    for name, held in table.resident.items():
        yield name, torch.cat(_stack(table, held, state, tp_rank=tp_rank, tp_size=tp_size, on_cpu=on_cpu))


def _stack(
    table: FamilyTable, held: Sequence[Entry], state: Mapping[str, Tensor], *, tp_rank: int, tp_size: int, on_cpu: bool
) -> list[Tensor]:
    """The pieces of one resident tensor: those of its entries in order."""
    return [
        piece
        for entry in held
        for piece in engine_pieces(
            table, entry, [state[n] for n in entry.hf], tp_rank=tp_rank, tp_size=tp_size, on_cpu=on_cpu
        )
    ]
