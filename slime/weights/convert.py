"""HF tensors <-> Megatron tensor-parallel shards, bitwise in both directions. Pure torch; knows no engine.

The rules are those of Megatron-core's linear layers: QKV rows are grouped per KV head (`[q * heads_per_group, k, v]`),
`linear_fc1` holds `[gate; up]` of its own shard, vocabulary rows may be padded with zeros after the last real entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slime.core.errors import CheckpointError, ConfigError
from slime.weights.tables import Entry, FamilyTable, Kind, ModelShape

ReadHF = Callable[[str], Tensor]
"""HF tensor name -> the full tensor."""


def load_shard(
    table: FamilyTable, megatron_name: str, read_hf: ReadHF, *, tp_rank: int, tp_size: int, vocab_multiple: int = 1
) -> Tensor:
    """The shard of a Megatron parameter that rank `tp_rank` holds, contiguous, in the dtype of the checkpoint.

    For an expert, rank and size are those of its own tensor-parallel group. Vocabulary rows are padded with zeros to a
    multiple of `vocab_multiple * tp_size`, as Megatron does.
    Raises `CheckpointError` if a tensor has another shape than the config implies, `ConfigError` if the cut is uneven.
    """
    assert 0 <= tp_rank < tp_size, f"tp_rank {tp_rank} of {tp_size}"
    entry = table.entry(megatron_name)
    check_divisible(table, entry, tp_size)
    parts = [_checked(table, name, read_hf(name)) for name in entry.hf]
    if entry.kind is Kind.COPY:
        return parts[0].contiguous()
    if entry.kind is Kind.QKV:
        return _group_qkv(table.shape, parts).chunk(tp_size)[tp_rank].contiguous()
    if entry.kind is Kind.VOCAB:
        padding = -parts[0].shape[0] % (vocab_multiple * tp_size)
        padded = torch.cat([parts[0], parts[0].new_zeros(padding, *parts[0].shape[1:])]) if padding else parts[0]
        return padded.chunk(tp_size)[tp_rank].contiguous()
    dim = 1 if entry.kind is Kind.ROW else 0
    return torch.cat([p.chunk(tp_size, dim)[tp_rank] for p in parts]).contiguous()


def export(table: FamilyTable, megatron_name: str, shards: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """The HF tensors of a Megatron parameter, from its shards in rank order (a replicated one may come once).

    Returns `(hf_name, full tensor)` in the order of the row, contiguous, dtype unchanged, without vocabulary padding.
    """
    assert shards, f"no shard of {megatron_name}"
    entry = table.entry(megatron_name)
    if entry.kind is Kind.COPY:
        for rank, other in enumerate(shards[1:], 1):
            assert torch.equal(shards[0], other), (
                f"{megatron_name} is replicated but differs between TP ranks 0 and {rank}"
            )
        full = [shards[0].contiguous()]
    elif entry.kind is Kind.QKV:
        full = _split_qkv(table.shape, _joined(shards, 0))
    elif entry.kind is Kind.VOCAB:
        full = [_joined(shards, 0)[: table.shape.vocab_size].contiguous()]
    elif entry.kind is Kind.GATE_UP:
        halves = [shard.chunk(2) for shard in shards]
        full = [_joined([half[i] for half in halves], 0).contiguous() for i in range(2)]
    else:
        full = [_joined(shards, 1 if entry.kind is Kind.ROW else 0).contiguous()]
    for name, tensor in zip(entry.hf, full, strict=True):
        want = table.hf_shape(name)
        assert tuple(tensor.shape) == want, (
            f"{megatron_name} exports {name} as {tuple(tensor.shape)}, config implies {want}"
        )
    return list(zip(entry.hf, full, strict=True))


def check_divisible(table: FamilyTable, entry: Entry, tp_size: int) -> None:
    """Raises `ConfigError` if the trainer cannot cut `entry` into `tp_size` equal shards."""
    size, what = {
        Kind.QKV: (table.shape.num_kv_heads, "KV heads"),
        Kind.GATE_UP: (table.mlp_size(entry), "MLP features"),
        Kind.ROW: (
            table.shape.num_kv_heads if "linear_proj" in entry.megatron else table.mlp_size(entry),
            "inputs",
        ),
    }.get(entry.kind, (tp_size, ""))
    if size % tp_size:
        raise ConfigError(
            f"got tensor_model_parallel_size={tp_size}, but {entry.megatron} has {size} {what}, "
            f"which do not divide evenly; choose a divisor of {size}"
        )


def _checked(table: FamilyTable, hf_name: str, tensor: Tensor) -> Tensor:
    want = table.hf_shape(hf_name)
    if tuple(tensor.shape) != want:
        raise CheckpointError(
            f"got {hf_name} of shape {list(tensor.shape)}; config.json implies {list(want)}; "
            "checkpoint and config do not belong together"
        )
    return tensor


def _joined(shards: Sequence[Tensor], dim: int) -> Tensor:
    return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim)


def _group_qkv(shape: ModelShape, parts: Sequence[Tensor]) -> Tensor:
    """q [heads*d, ...], k and v [groups*d, ...] -> [groups * (heads_per_group + 2) * d, ...]."""
    grouped = [p.unflatten(0, (shape.num_kv_heads, -1)) for p in parts]
    return torch.cat(grouped, 1).flatten(0, 1)


def _split_qkv(shape: ModelShape, fused: Tensor) -> list[Tensor]:
    """The inverse of `_group_qkv`."""
    d, m = shape.head_dim, shape.heads_per_group
    parts = fused.unflatten(0, (shape.num_kv_heads, (m + 2) * d)).split([m * d, d, d], 1)
    return [p.reshape(-1, *fused.shape[1:]) for p in parts]
