"""LoRA adapters in files: their rows in weight tables, and the PEFT folder format.

A fused layer has one adapter here but several modules in PEFT. Each PEFT module gets the shared `a` and its own rows of
`b`, so its `scale * b a` equals what a merged export adds to the module's weight.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from slime.core.errors import CheckpointError
from slime.core.files import open_to_readers
from slime.models.common.table import EXPERT, Entry, FamilyTable, Row

A, B = "lora_a", "lora_b"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
"""PEFT's prefix for module names."""


def with_adapters(table: FamilyTable, adapted: Collection[str], rank: int) -> FamilyTable:
    """Returns the table with adapter rows of rank `rank`, each right after the row it adapts."""

    def more(row: Row, layer: int) -> tuple[Row, ...]:
        # The experts of a layer are adapted together.
        return adapter_rows(row, rank) if Entry.of(row, layer, expert=0).megatron in adapted else ()

    layers = tuple(rows + tuple(r for row in rows for r in more(row, i)) for i, rows in enumerate(table.layers))
    return dataclasses.replace(table, layers=layers)


def adapters_alone(table: FamilyTable) -> FamilyTable:
    layers = tuple(tuple(row for row in rows if row.megatron.endswith((A, B))) for rows in table.layers)
    return dataclasses.replace(table, before=(), layers=layers, after=())


def without_adapters(table: FamilyTable) -> FamilyTable:
    layers = tuple(tuple(row for row in rows if not row.megatron.endswith((A, B))) for rows in table.layers)
    return dataclasses.replace(table, layers=layers)


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Merges a weight, or a shard of a weight, with its adapter. Returns float32."""
    return (b.float() @ a.float()).mul_(scale).add_(weight)


def adapter_rows(row: Row, rank: int) -> tuple[Row, Row]:
    """Returns the table rows for `a` and `b` of a linear layer.

    Each is one HF tensor. The dimension that it shares with the weight is split like the weight's.
    """
    sizes = [sum(s[dim] for s in row.shapes) if row.dim == dim else row.shapes[0][dim] for dim in (0, 1)]

    def part(name: str, shape: tuple[int, int], dim: int) -> Row:
        full = row.megatron.removesuffix("weight") + name
        if row.dim != dim:
            return Row(full, (full,), (shape,), full)
        return Row(full, (full,), (shape,), full, dim, row.units, row.segments, row.groups)

    return part(A, (rank, sizes[1]), 1), part(B, (sizes[0], rank), 0)


def peft_knows(table: FamilyTable) -> bool:
    """Returns whether PEFT supports all adapters in a table. It does not support adapters of routed experts."""
    return not any(EXPERT in row.megatron for rows in adapters_alone(table).layers for row in rows)


def write_peft(
    directory: Path, table: FamilyTable, tensors: Iterable[tuple[str, Tensor]], *, scale: float, base: str | None
) -> None:
    """Writes `directory` in the format that PEFT's `PeftModel.from_pretrained` reads.

    `table`: the model's table with adapter rows. `tensors`: (name, full tensor) of each adapter. `base`: the name of
    the base model. Raises `CheckpointError` for adapters of routed experts.
    """
    if not peft_knows(table):
        raise CheckpointError(
            f"PEFT does not support adapters for the routed experts of {table.family}, which are not modules in "
            "transformers; export the merged model instead"
        )
    found = {name: tensor.detach().cpu() for name, tensor in tensors}
    written = dict(_modules(table, found))
    rank = next(iter(written.values())).shape[0]
    directory.mkdir(parents=True, exist_ok=True)
    save_file(written, directory / WEIGHTS, metadata={"format": "pt"})
    open_to_readers(directory / WEIGHTS)
    modules = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in written}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": _module_names(table, modules),
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _modules(table: FamilyTable, found: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for entry in table.entries:
        linear = entry.megatron.removesuffix("weight")
        if linear + A not in found:
            continue
        a, b = found[linear + A], found[linear + B]
        sizes = [shape[0] for shape in entry.row.shapes]
        assert sum(sizes) == len(b), f"{entry.megatron}: b has {len(b)} rows, expected {sizes}"
        for name, rows in zip(entry.hf, torch.split(b, sizes), strict=True):
            module = PREFIX + name.removesuffix(".weight")
            yield f"{module}.lora_A.weight", a.clone(memory_format=torch.contiguous_format)
            yield f"{module}.lora_B.weight", rows.clone(memory_format=torch.contiguous_format)


def _module_names(table: FamilyTable, modules: set[str]) -> list[str]:
    """Returns the last components of the module names if these match no other modules, otherwise the full names."""
    ends = {name.rpartition(".")[2] for name in modules}
    named = {name.removesuffix(".weight") for name in table.hf_names if name.endswith(".weight")}
    return sorted(ends if {n for n in named if n.rpartition(".")[2] in ends} == modules else modules)
