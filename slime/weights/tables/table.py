"""Rows that say how one Megatron parameter, its Hugging Face tensors and the engine's resident tensor belong together.

Invariants
1. Every Megatron parameter and every HF tensor of a model is named by exactly one row (`FamilyTable.check`). A row of
   experts names one parameter per expert, under the expert's number in the whole model; the engine holds all experts of
   a row in one tensor.
2. A row is read in both directions: HF -> Megatron shard on load, Megatron shards -> HF on export, HF -> engine shard
   for verification. No direction has names or rules of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from slime.config.model_shape import num_experts_of
from slime.core.errors import ConfigError, WeightSyncError

LAYER = "{layer}"
"""Stands for the layer number in name patterns."""
EXPERT = "{expert}"
"""Stands for the number of a routed expert in name patterns."""


class Kind(str, Enum):
    """How a tensor is fused and cut over tensor-parallel ranks (the same cut in Megatron and in the engine)."""

    COPY = "copy"
    """Whole on every rank (norms, biases added after the reduction)."""
    VOCAB = "vocab"
    """Rows are vocabulary entries: cut over dim 0; each side pads in its own way."""
    QKV = "qkv"
    """HF tensors q, k, v. Megatron interleaves them per KV head, [q of the group, k, v]; engines stack q, k, v."""
    GATE_UP = "gate_up"
    """Two HF tensors, stacked [gate; up] within each rank's shard."""
    COLUMN = "column"
    """Cut over dim 0 (output features)."""
    ROW = "row"
    """Cut over dim 1 (input features)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One parameter under its three names; `{layer}` is the layer number, `{expert}` that of a routed expert."""

    megatron: str
    """Name in `GPTModel.named_parameters()` under the local layer spec."""
    hf: tuple[str, ...]
    """The HF tensors that it holds, in fusing order."""
    engine: str
    """Name of the resident tensor of an SGLang model; without `{expert}`, for it holds all of them."""
    kind: Kind


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that decide where tensors are cut."""

    num_layers: int
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """KV heads, which Megatron calls query groups."""
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_experts: int = 0
    """Routed experts of each layer; 0 for a dense model."""
    moe_intermediate_size: int = 0
    """MLP features of one routed expert."""

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any]) -> ModelShape:
        """Reads a `config.json`. Raises `ConfigError` if a size is missing or heads cannot be grouped."""
        try:
            heads, hidden = int(hf_config["num_attention_heads"]), int(hf_config["hidden_size"])
            shape = cls(
                num_layers=int(hf_config["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=int(hf_config.get("num_key_value_heads") or heads),
                head_dim=int(hf_config.get("head_dim") or hidden // heads),
                hidden_size=hidden,
                intermediate_size=int(hf_config["intermediate_size"]),
                vocab_size=int(hf_config["vocab_size"]),
                num_experts=num_experts_of(hf_config),
                moe_intermediate_size=int(hf_config.get("moe_intermediate_size") or 0),
            )
        except KeyError as error:
            raise ConfigError(
                f"got a model config without {error}; a weight table needs it; complete config.json"
            ) from None
        if shape.num_heads % shape.num_kv_heads:
            raise ConfigError(
                f"got {shape.num_heads} attention heads and {shape.num_kv_heads} KV heads; "
                "query heads must divide evenly over KV heads; correct config.json"
            )
        return shape

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Entry:
    """A row with its layer and expert number filled in."""

    megatron: str
    hf: tuple[str, ...]
    engine: str
    kind: Kind
    expert: int | None = None
    """Number of the routed expert in its layer; None for everything else."""

    @classmethod
    def of(cls, row: Row, layer: int | None, expert: int | None = None) -> Entry:
        def fill(pattern: str) -> str:
            return pattern.replace(LAYER, str(layer)).replace(EXPERT, str(expert))

        return cls(fill(row.megatron), tuple(map(fill, row.hf)), fill(row.engine), row.kind, expert)


@dataclass(frozen=True, slots=True)
class FamilyTable:
    """All rows of one model. Build it with `table_for`."""

    family: str
    """`model_type` of the HF config."""
    shape: ModelShape
    rows: tuple[Row, ...]
    """Rows that this model has (optional biases and the output layer already decided), in export order."""
    tied: bool
    """The output layer shares the embedding: no row of its own, neither in Megatron nor in the engine."""
    entries: tuple[Entry, ...] = field(init=False)
    """Rows with layer and expert numbers, in export order: embedding, layers, final norm, output layer."""
    resident: Mapping[str, tuple[Entry, ...]] = field(init=False, repr=False, compare=False)
    """Resident tensor of an engine -> the entries that it holds, in stacking order (one, or one per expert)."""
    _by_megatron: Mapping[str, Entry] = field(init=False, repr=False, compare=False)
    _by_hf: Mapping[str, Entry] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        entries = tuple(self._expand())
        object.__setattr__(self, "entries", entries)
        resident: dict[str, tuple[Entry, ...]] = {}
        for e in entries:
            resident[e.engine] = (*resident.get(e.engine, ()), e)
        object.__setattr__(self, "resident", resident)
        object.__setattr__(self, "_by_megatron", {e.megatron: e for e in entries})
        object.__setattr__(self, "_by_hf", {name: e for e in entries for name in e.hf})
        for what, names in (
            ("Megatron", [e.megatron for e in entries]),
            ("HF", [name for e in entries for name in e.hf]),
            ("engine", [(e.engine, e.expert) for e in entries]),
        ):
            doubled = [name for name, count in Counter(names).items() if count > 1]
            assert not doubled, f"table {self.family}: {what} names in two rows: {doubled}"

    def _expand(self) -> Iterable[Entry]:
        per_layer = [row for row in self.rows if LAYER in row.megatron]
        first_layer_row = self.rows.index(per_layer[0]) if per_layer else len(self.rows)
        yield from (Entry.of(row, None) for row in self.rows[:first_layer_row])
        for layer in range(self.shape.num_layers):
            for row in per_layer:
                experts = range(self.shape.num_experts) if EXPERT in row.megatron else (None,)
                yield from (Entry.of(row, layer, expert) for expert in experts)
        yield from (Entry.of(row, None) for row in self.rows[first_layer_row:] if LAYER not in row.megatron)

    def entry(self, megatron_name: str) -> Entry:
        """The entry of a Megatron parameter. Raises `WeightSyncError` if the table does not know it."""
        found = self._by_megatron.get(megatron_name)
        if found is None:
            raise WeightSyncError(
                f"got Megatron parameter {megatron_name!r}, which table {self.family!r} of {self.shape.num_layers} "
                "layers does not name; the model was built otherwise than its HF config says"
            )
        return found

    def entry_of_hf(self, hf_name: str) -> Entry:
        """The entry that a HF tensor belongs to. Raises `WeightSyncError` if the table does not know it."""
        found = self._by_hf.get(hf_name)
        if found is None:
            raise WeightSyncError(f"got HF tensor {hf_name!r}, which table {self.family!r} does not name")
        return found

    @property
    def megatron_names(self) -> tuple[str, ...]:
        """All Megatron parameters, in export order."""
        return tuple(e.megatron for e in self.entries)

    @property
    def hf_names(self) -> tuple[str, ...]:
        """All HF tensors, in export order."""
        return tuple(name for e in self.entries for name in e.hf)

    def mlp_size(self, entry: Entry) -> int:
        """MLP features of the tensor: of the dense layer, or of one expert."""
        return self.shape.intermediate_size if entry.expert is None else self.shape.moe_intermediate_size

    def hf_shape(self, hf_name: str) -> tuple[int, ...]:
        """Shape of a HF tensor as the config implies it."""
        entry, s = self.entry_of_hf(hf_name), self.shape
        part = entry.hf.index(hf_name)
        weight = hf_name.endswith(".weight")
        if entry.kind is Kind.VOCAB:
            return (s.vocab_size, s.hidden_size)
        if entry.kind is Kind.QKV:
            rows = (s.num_heads if part == 0 else s.num_kv_heads) * s.head_dim
            return (rows, s.hidden_size) if weight else (rows,)
        if entry.kind is Kind.GATE_UP:
            return (self.mlp_size(entry), s.hidden_size) if weight else (self.mlp_size(entry),)
        if entry.kind is Kind.ROW:
            columns = self.mlp_size(entry) if "mlp" in hf_name else s.num_heads * s.head_dim
            return (s.hidden_size, columns)
        assert entry.kind is Kind.COPY, f"no shape rule for {entry.kind} of {hf_name}"
        if hf_name.endswith("mlp.gate.weight"):
            return (s.num_experts, s.hidden_size)
        return (s.head_dim,) if hf_name.endswith(("q_norm.weight", "k_norm.weight")) else (s.hidden_size,)

    def check(self, megatron_names: Iterable[str] | None = None, hf_names: Iterable[str] | None = None) -> None:
        """Refuses a model or checkpoint that the table misses or doubles a tensor of.

        A tied checkpoint may carry its redundant `lm_head.weight`; rotary buffers of old checkpoints are ignored.
        Raises `ConfigError` that names every missing, unknown and doubled tensor.
        """
        for what, got, known in (("Megatron", megatron_names, self.megatron_names), ("HF", hf_names, self.hf_names)):
            if got is None:
                continue
            names = [
                n for n in got if not n.endswith("rotary_emb.inv_freq") and not (self.tied and n == "lm_head.weight")
            ]
            missing, unknown = sorted(set(known) - set(names)), sorted(set(names) - set(known))
            doubled = sorted(n for n, count in Counter(names).items() if count > 1)
            if missing or unknown or doubled:
                raise ConfigError(
                    f"got {len(names)} {what} tensors for table {self.family!r}, which needs {len(known)}: "
                    f"missing {_some(missing)}, unknown {_some(unknown)}, doubled {_some(doubled)}; "
                    "the model must be built from the same config.json as the table"
                )


def _some(names: list[str], limit: int = 8) -> str:
    if not names:
        return "none"
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
