"""The weight map: each row links one Megatron parameter, its Hugging Face tensors and the engine's resident tensor.

Invariants
1. Exactly one row names every Megatron parameter and every HF tensor of a model (`FamilyTable.check`), except HF
   tensors that the trainer carries along unread. A row of experts names one parameter per expert, under the expert's
   number in the whole model; the engine holds all experts of a row in one tensor.
2. All directions use the same rows: HF -> Megatron shard on load, Megatron shards -> HF on export, HF -> engine shard
   for verification. No direction has names or rules of its own.
3. One formula splits every parameter: segments, interleaved in groups, in equal parts (`convert`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any

from slime.core.errors import ConfigError, WeightSyncError
from slime.core.hf_config import HfConfig, num_experts_of
from slime.core.text import listed
from slime.core.topology import EngineLayout

# How SGLang spreads a family's model over the ranks of an engine, beyond tensor parallelism, which all families have.
#
# This depends on the model's code in SGLang 0.5.16 (`srt/models/`). A family declares only what was read there and
# tested; anything else is refused before a run starts (`problem`).


class Head(str, Enum):
    """The pipeline stages that hold the output layer."""

    LAST = "last"
    EVERY = "every"


@dataclass(frozen=True, slots=True)
class Spread:
    """The parallel layouts that an engine supports for a family."""

    dp_attention: bool = False
    """A DP group may share attention, embedding and output layer among its own ranks."""
    dp_lm_head: bool = True
    """With DP attention, a DP group may share the output layer among its own ranks, too."""
    whole_embedding: bool = False
    """With DP attention the embedding is whole on each rank."""
    stages: Head | None = None
    """The stages that hold the output layer; None: the model cannot run in pipeline stages."""
    tied_stages: bool = False
    """In stages, a tied output layer is a separate tensor on the last stage, loaded from the embedding."""
    whole_dense_mlp: bool = False
    """`moe_dense_tp_size` 1 makes the MLP of dense layers whole on each rank."""
    every_embedding: bool = False
    """In stages, each stage holds the embedding."""
    whole_stages: bool = False
    """A stage must be one rank, because its loader does not divide experts."""


PLAIN = Spread()
"""Tensor and expert parallelism alone."""


def problem(spread: Spread, layout: EngineLayout, *, tied: bool, num_experts: int) -> str | None:
    """Why an engine cannot have this layout, as a clause for a message; None if it can."""
    if layout.dp_size > 1 and not spread.dp_attention:
        return "its attention in SGLang knows no DP attention"
    if layout.dp_lm_head and not spread.dp_lm_head:
        return "its output layer in SGLang does not heed enable_dp_lm_head"
    if layout.tp_size > 1 and spread.whole_stages:
        return "its experts have biases, which ranks of SGLang do not share; give engines of one GPU a pipeline stage"
    if layout.pp_size > 1 and spread.stages is None:
        return "its model in SGLang does not run in pipeline stages"
    if layout.pp_size > 1 and tied and not spread.tied_stages:
        return "its tied output layer would not be updated on the last pipeline stage"
    if layout.whole_dense_mlp and not spread.whole_dense_mlp:
        return "its dense MLP in SGLang does not heed moe_dense_tp_size"
    if layout.ep_size > 1 and (num_experts == 0 or num_experts % layout.ep_size):
        return f"it has {num_experts} experts, which {layout.ep_size} groups cannot share evenly"
    return None


LAYER = "{layer}"
"""The placeholder for the layer number in name patterns."""
EXPERT = "{expert}"
"""The placeholder for the number of a routed expert in name patterns."""

EMBEDDING = "embedding.word_embeddings.weight"
"""Megatron's name of the embedding."""
HEAD = "output_layer.weight"
"""Megatron's name of the output layer."""
ATTENTION = ".self_attention."
"""Part of the Megatron names of all parameters of attention, or of the module in its place."""
DRAFT = "draft."
"""The prefix under which SGLang reports the resident tensors of the draft model."""


class Unit(str, Enum):
    """The unit of a segment's split dimension, which stays whole on one rank, and how engines pad it."""

    NONE = "none"
    """Whole on every rank (norms, biases added after the reduction)."""
    VOCAB = "vocabulary rows"
    """Vocabulary entries; trainer and engine pad them, each in its own way."""
    HEADS = "attention heads"
    """Query heads."""
    KV_HEADS = "KV heads"
    """KV heads; engines replicate them if there are fewer than ranks."""
    FEATURES = "MLP features"
    """Features of an MLP, which engines on a CPU pad."""
    EVEN = "features"
    """Anything else that divides evenly and is never padded."""


@dataclass(frozen=True, slots=True)
class Row:
    """One parameter under its three names; `{layer}` is the layer number, `{expert}` that of a routed expert."""

    megatron: str
    """Global name of the parameter in our model."""
    hf: tuple[str, ...]
    """The HF tensors that it holds, in fusing order."""
    shapes: tuple[tuple[int, ...], ...]
    """Full shape of each HF tensor; if `stacked`, of one expert's part."""
    engine: str
    """Name of the resident tensor in SGLang; rows and experts that share a tensor are stacked along dim 0."""
    dim: int | None = None
    """The dimension that tensor-parallel ranks split; None: whole on every rank."""
    units: tuple[Unit, ...] = ()
    """The unit of each segment."""
    segments: tuple[int, ...] = ()
    """Lengths along `dim`, over the concatenated HF tensors, of the parts that are split separately. Empty: one segment
    per HF tensor.
    """
    groups: int = 0
    """Megatron interleaves the segments in this many equal groups (KV heads, for example); 0: one group per rank."""
    wide: bool = False
    """float32 in the trainer, in files and in the engine, for any training dtype."""
    stacked: bool = False
    """The HF tensors hold all experts along dim 0."""
    trained: bool = True
    """False for a buffer or a frozen parameter, which is loaded, exported and synced but never trained."""
    engines: tuple[str, ...] = ()
    """One resident tensor for each HF tensor, instead of `engine`, if the engine keeps apart what the trainer fuses."""
    plus_one: str = ""
    """Resident tensor that an engine keeps beside this one: a zero-centred norm's weight plus one."""
    transposed: bool = False
    """The engine holds it as [in, out]."""

    def __post_init__(self) -> None:
        if self.dim is None:
            object.__setattr__(self, "units", (Unit.NONE,) * len(self.hf))
        elif not self.segments:
            object.__setattr__(self, "segments", tuple(shape[self.dim] for shape in self.shapes))
        assert len(self.hf) == len(self.shapes), f"{self.megatron}: {len(self.hf)} names, {len(self.shapes)} shapes"
        if self.dim is not None:
            total = sum(shape[self.dim] for shape in self.shapes)
            assert sum(self.segments) == total, f"{self.megatron}: segments {self.segments} of {total}"
            assert len(self.units) == len(self.segments), f"{self.megatron}: {self.units} for {self.segments}"

    def apart(self) -> tuple[Row, ...]:
        """One row per HF tensor if `engines` names their resident tensors; else empty."""
        out, first = [], 0
        for i, engine in enumerate(self.engines):
            assert self.dim is not None, f"{self.megatron} is not split"
            size, last = self.shapes[i][self.dim], first
            while sum(self.segments[first:last]) < size:
                last += 1
            own: dict[str, Any] = {"segments": self.segments[first:last], "units": self.units[first:last]}
            own |= {"hf": (self.hf[i],), "shapes": (self.shapes[i],), "engine": engine, "engines": ()}
            out.append(replace(self, **own))
            first = last
        return tuple(out)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes that determine where tensors are split."""

    num_layers: int
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Megatron calls them query groups."""
    head_dim: int
    hidden_size: int
    intermediate_size: int
    """MLP features of a dense layer."""
    vocab_size: int
    num_experts: int = 0
    """Routed experts of each layer that has experts; 0 for a dense model."""
    moe_intermediate_size: int = 0
    """MLP features of one routed expert."""

    @classmethod
    def from_hf(cls, hf_config: HfConfig) -> ModelSizes:
        """Reads a `config.json`. Raises `ConfigError` if a size is missing or heads cannot be grouped."""
        try:
            heads, hidden = int(hf_config["num_attention_heads"]), int(hf_config["hidden_size"])
            sizes = cls(
                num_layers=int(hf_config["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=int(hf_config.get("num_key_value_heads") or heads),
                head_dim=int(hf_config.get("head_dim") or hidden // heads),
                hidden_size=hidden,
                intermediate_size=int(hf_config.get("intermediate_size") or 0),
                vocab_size=int(hf_config["vocab_size"]),
                num_experts=num_experts_of(hf_config),
                moe_intermediate_size=int(hf_config.get("moe_intermediate_size") or 0),
            )
        except KeyError as error:
            raise ConfigError(
                f"got a model config without {error}; a weight table needs it; complete config.json"
            ) from None
        if sizes.num_heads % sizes.num_kv_heads:
            raise ConfigError(
                f"got {sizes.num_heads} attention heads and {sizes.num_kv_heads} KV heads; "
                "query heads must divide evenly over KV heads; correct config.json"
            )
        return sizes

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
    row: Row
    expert: int | None = None
    """Number of the routed expert in its layer; None for everything else."""
    apart: tuple[Entry, ...] = ()
    """One entry per resident tensor, if the engine has several for this row."""
    plus_one: str = ""
    """Same as `Row.plus_one`."""
    layer: int | None = None
    """The layer number; None before and after the layers."""

    @classmethod
    def of(cls, row: Row, layer: int | None, expert: int | None = None) -> Entry:
        def fill(pattern: str) -> str:
            return pattern.replace(LAYER, str(layer)).replace(EXPERT, str(expert))

        apart = tuple(cls.of(part, layer, expert) for part in row.apart())
        names = fill(row.megatron), tuple(map(fill, row.hf)), fill(row.engine)
        return cls(*names, row, expert, apart, fill(row.plus_one), layer)


@dataclass(frozen=True)
class FamilyTable:
    """All rows of one model. Build it with `table_for`."""

    family: str
    """`model_type` of the HF config."""
    sizes: ModelSizes
    before: tuple[Row, ...]
    """The rows before the layers: the embedding."""
    layers: tuple[tuple[Row, ...], ...]
    """The rows of each layer of this model (optional biases already decided), in export order."""
    after: tuple[Row, ...]
    """The rows after the layers: final norm, output layer."""
    tied: bool
    """The output layer shares the embedding, so neither Megatron nor the engine has a row for it."""
    mtp: tuple[Row, ...] = ()
    """The rows of a trained multi-token prediction layer; an engine holds them in its draft model, if it has one."""
    duplicates: Mapping[str, str] = field(default_factory=dict)
    """HF tensors stored a second time -> the first. They are not read, and an export writes them from the first."""
    carried: tuple[str, ...] = ()
    """Patterns (`re.match`) of HF tensors that an export copies from the source checkpoint, and of resident tensors
    that no weight sync changes.
    """
    spread: Spread = PLAIN
    """How an engine may spread the model over ranks."""
    entries: tuple[Entry, ...] = field(init=False, repr=False, compare=False)
    """Rows with layer and expert numbers, in export order."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "entries", tuple(self._expand()))
        for what, names in (
            ("Megatron", [e.megatron for e in self.entries]),
            ("HF", [(name, e.expert if e.row.stacked else None) for e in self.entries for name in e.hf]),
        ):
            doubled = [name for name, count in Counter(names).items() if count > 1]
            assert not doubled, f"table {self.family}: {what} names in two rows: {doubled}"

    def _expand(self) -> Iterable[Entry]:
        yield from (Entry.of(row, None) for row in self.before)
        for layer, rows in (*enumerate(self.layers), (None, self.mtp)):
            for row in rows:
                experts = range(self.sizes.num_experts) if EXPERT in row.megatron else (None,)
                yield from (Entry.of(row, layer, expert) for expert in experts)
        yield from (Entry.of(row, None) for row in self.after)

    @cached_property
    def runs(self) -> tuple[tuple[Entry, ...], ...]:
        """The entries in export order, grouped: the experts of a row and layer together, every other entry alone."""
        out: list[list[Entry]] = []
        for e in self.entries:
            if e.expert:  # expert 0 starts a new run
                out[-1].append(e)
            else:
                out.append([e])
        return tuple(map(tuple, out))

    @cached_property
    def resident(self) -> Mapping[str, tuple[Entry, ...]]:
        """Resident tensor of an engine -> the entries that it holds, in stacking order."""
        out: dict[str, list[Entry]] = {}
        for e in self.entries:
            for part in e.apart or (e,):
                out.setdefault(part.engine, []).append(part)
        return {name: tuple(held) for name, held in out.items()}

    @cached_property
    def resident_of(self) -> Mapping[str, str]:
        """HF tensor -> the resident tensor of an engine that holds it."""
        return {hf: name for name, held in self.resident.items() for e in held for hf in e.hf}

    @cached_property
    def together(self) -> Mapping[str, str]:
        """HF tensor -> its resident tensor, if the engine must load the tensors of several rows in one call."""
        several = {name: held for name, held in self.resident.items() if len(held) > 1 and held[0].expert is None}
        return {hf: name for name, held in several.items() for e in held for hf in e.hf}

    @cached_property
    def _by_megatron(self) -> Mapping[str, Entry]:
        return {e.megatron: e for e in self.entries}

    @cached_property
    def _by_hf(self) -> Mapping[str, Entry]:
        """HF tensor -> its first entry; stacked experts share an HF tensor."""
        return {name: e for e in reversed(self.entries) for name in e.hf}

    def entry(self, megatron_name: str) -> Entry:
        """The entry of a Megatron parameter. Raises `WeightSyncError` if the table does not know it."""
        found = self._by_megatron.get(megatron_name)
        if found is None:
            raise WeightSyncError(
                f"got Megatron parameter {megatron_name!r}, which table {self.family!r} of {self.sizes.num_layers} "
                "layers does not name; the model does not match its HF config"
            )
        return found

    def entry_of_hf(self, hf_name: str) -> Entry:
        """The entry of an HF tensor. Raises `WeightSyncError` if the table does not know it."""
        found = self._by_hf.get(hf_name)
        if found is None:
            raise WeightSyncError(f"got HF tensor {hf_name!r}, which table {self.family!r} does not name")
        return found

    @property
    def megatron_names(self) -> tuple[str, ...]:
        """All Megatron parameters, in export order."""
        return tuple(e.megatron for e in self.entries)

    @cached_property
    def hf_names(self) -> tuple[str, ...]:
        """All HF tensors, in export order."""
        return tuple(dict.fromkeys(name for e in self.entries for name in e.hf))

    def shape_of(self, hf_name: str) -> tuple[int, ...]:
        """Shape of an HF tensor according to the config."""
        entry = self.entry_of_hf(hf_name)
        shape = entry.row.shapes[entry.hf.index(hf_name)]
        return (self.sizes.num_experts, *shape) if entry.row.stacked else shape

    def carries(self, hf_name: str) -> bool:
        """Whether an HF tensor is carried along, not held by the trainer."""
        return any(re.match(pattern, hf_name) for pattern in self.carried)

    def check(self, megatron_names: Iterable[str] | None = None, hf_names: Iterable[str] | None = None) -> None:
        """Raises `ConfigError` that names every missing, unknown and duplicate tensor of a model or checkpoint.

        A tied checkpoint may contain a redundant `lm_head.weight`; rotary buffers of old checkpoints are ignored.
        """
        for what, got, known in (("Megatron", megatron_names, self.megatron_names), ("HF", hf_names, self.hf_names)):
            if got is None:
                continue
            names = [n for n in got if what == "Megatron" or not self.ignores(n)]
            missing, unknown = sorted(set(known) - set(names)), sorted(set(names) - set(known))
            doubled = sorted(n for n, count in Counter(names).items() if count > 1)
            if missing or unknown or doubled:
                raise ConfigError(
                    f"got {len(names)} {what} tensors for table {self.family!r}, which needs {len(known)}: "
                    f"missing {listed(missing)}, unknown {listed(unknown)}, doubled {listed(doubled)}; "
                    "the model must be built from the same config.json as the table"
                )

    def ignores(self, hf_name: str) -> bool:
        """Whether the trainer does not hold this HF tensor of a checkpoint: carried, redundant or a rotary buffer."""
        redundant = self.tied and hf_name.endswith("lm_head.weight")
        buffer = hf_name.endswith("rotary_emb.inv_freq")
        return redundant or buffer or hf_name in self.duplicates or self.carries(hf_name)
