"""What one SGLang rank holds of the full HF tensors: fused, sharded, padded; and the digests of exactly that.

The trainer computes these digests on its own tensors before they travel, so that equality with what the engine reports
afterwards covers names, fusing, sharding, padding, dtype and every bit on the way.

Rules, of SGLang 0.5.16 (`layers/linear.py`, `layers/vocab_parallel_embedding.py`): q, k, v are stacked per rank; with
fewer KV heads than ranks each KV head is replicated; gate and up are stacked per rank; the vocabulary is padded with
zero rows to a multiple of 64 (times the ranks, on a CPU, where 64 does not divide evenly); a tied head is not resident.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from slime.core.errors import ConfigError, WeightSyncError
from slime.core.ports import Digest
from slime.weights.tables import Entry, FamilyTable, Kind

VOCAB_PADDING = 64
"""SGLang pads vocabularies to a multiple of this."""


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Rows of the embedding over all ranks of an engine."""
    multiple = VOCAB_PADDING
    if (vocab_size + -vocab_size % multiple) % tp_size:
        multiple *= tp_size
    return vocab_size + -vocab_size % multiple


def engine_shard(table: FamilyTable, entry: Entry, parts: Sequence[Tensor], *, tp_rank: int, tp_size: int) -> Tensor:
    """What engine rank `tp_rank` holds of `entry`, contiguous; `parts` are its full HF tensors in the order of the row.

    Raises `ConfigError` if the engine cannot cut the tensor evenly.
    """
    if entry.kind is Kind.COPY:
        return parts[0].contiguous()
    if entry.kind is Kind.VOCAB:
        per_rank = padded_vocab_size(parts[0].shape[0], tp_size) // tp_size
        rows = parts[0][tp_rank * per_rank : (tp_rank + 1) * per_rank]
        padding = per_rank - rows.shape[0]
        return torch.cat([rows, rows.new_zeros(padding, *rows.shape[1:])]) if padding else rows.contiguous()
    if entry.kind is Kind.QKV:
        heads, kv_heads = table.shape.num_heads, table.shape.num_kv_heads
        if heads % tp_size or max(kv_heads, tp_size) % min(kv_heads, tp_size):
            raise ConfigError(f"got an engine of {tp_size} ranks for {heads} heads and {kv_heads} KV heads; uneven cut")
        kv_cuts = min(kv_heads, tp_size)
        kv_rank = tp_rank * kv_cuts // tp_size
        cuts = [(parts[0], tp_size, tp_rank), (parts[1], kv_cuts, kv_rank), (parts[2], kv_cuts, kv_rank)]
        return torch.cat([part.chunk(n)[r] for part, n, r in cuts])
    dim = 1 if entry.kind is Kind.ROW else 0
    if parts[0].shape[dim] % tp_size:
        raise ConfigError(
            f"got an engine of {tp_size} ranks for {entry.engine} of shape {list(parts[0].shape)}; uneven cut"
        )
    pieces = [part.chunk(tp_size, dim)[tp_rank] for part in parts]
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0].contiguous()


class ExpectedDigests:
    """Digests of every resident tensor, built while HF tensors stream by; holds at most one incomplete row at a time
    when tensors come in table order, and never a second copy of the model."""

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
        if len(waiting) == len(entry.hf):
            del self._waiting[entry.engine]
            self._complete(entry, [waiting[name] for name in entry.hf])

    def _complete(self, entry: Entry, parts: Sequence[Tensor]) -> None:
        for tp_size, ranks in self._digests.items():
            whole = self._digest(parts[0].contiguous()) if entry.kind is Kind.COPY else None
            for rank, digests in enumerate(ranks):
                shard = None if whole else engine_shard(self._table, entry, parts, tp_rank=rank, tp_size=tp_size)
                digests[entry.engine] = whole or self._digest(shard)

    def finish(self) -> dict[int, list[dict[str, str]]]:
        """tp_size -> per rank, resident name -> digest. Raises `WeightSyncError` if tensors are missing."""
        missing = [name for name in self._table.hf_names if name not in self._seen]
        if missing:
            raise WeightSyncError(
                f"got a publication without {missing[:8]} ({len(missing)} missing); send every tensor"
            )
        return self._digests


def engine_tensors(
    table: FamilyTable, parts: dict[str, Tensor], *, tp_rank: int, tp_size: int
) -> Iterator[tuple[str, Tensor]]:
    """All resident tensors of one rank from a whole state dict (for tests and tools)."""
    for entry in table.entries:
        yield entry.engine, engine_shard(table, entry, [parts[n] for n in entry.hf], tp_rank=tp_rank, tp_size=tp_size)
