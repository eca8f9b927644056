"""The weight table of a model: each row links a Megatron parameter, its HF tensors and the engine's resident tensor.

Invariants
1. Every Megatron parameter and HF tensor of a model is in exactly one row (`FamilyTable.check`), except HF tensors that
   the trainer does not load (`FamilyTable.carried`). A row of experts represents one parameter per expert, identified
   by the expert's global number. The engine stores all experts of a row in one tensor.
2. Loading (HF -> Megatron shard), export (Megatron shards -> HF) and verification (HF -> engine shard) all use the same
   rows. None of them has names or rules of its own.
3. One scheme covers every parameter: equal splits of segments, interleaved in groups (`weights.hf_shards`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any

from slime.core.errors import ConfigError, WeightSyncError
from slime.core.hf_config import HfConfig, num_experts_of
from slime.core.text import listed
from slime.core.topology import EngineLayout


class Head(str, Enum):
    """The pipeline stages that have the output layer."""

    LAST = "last"
    EVERY = "every"


@dataclass(frozen=True, slots=True)
class Spread:
    """Which layouts engines support for a family, besides tensor parallelism, which all families support.

    A family declares what SGLang 0.5.16 supports for its model (`srt/models/`) and what has been verified. Everything
    else is rejected before a run starts (`problem`).
    """

    dp_attention: bool = False
    """Whether attention and embedding can be split over the ranks of a DP group."""
    dp_lm_head: bool = True
    """With DP attention, whether the output layer can be split over the ranks of a DP group, too."""
    whole_embedding: bool = False
    """With DP attention, the embedding is replicated on each rank instead."""
    stages: Head | None = None
    """Which pipeline stages have the output layer. None: pipeline stages are not supported."""
    tied_stages: bool = False
    """With pipeline stages, the last stage has a separate copy of a tied output layer, loaded from the embedding."""
    whole_dense_mlp: bool = False
    """Whether `moe_dense_tp_size` 1 replicates the MLPs of dense layers on each rank."""
    every_embedding: bool = False
    """With pipeline stages, every stage has the embedding."""
    whole_stages: bool = False
    """Each pipeline stage must be a single rank, because SGLang's loader cannot split the experts."""


PLAIN = Spread()
"""Only tensor and expert parallelism."""


def problem(spread: Spread, layout: EngineLayout, *, tied: bool, num_experts: int) -> str | None:
    """Returns a clause for an error message if engines do not support this layout, else None."""
    if layout.dp_size > 1 and not spread.dp_attention:
        return "its model in SGLang does not support DP attention"
    if layout.dp_lm_head and not spread.dp_lm_head:
        return "its output layer in SGLang ignores enable_dp_lm_head"
    if layout.tp_size > 1 and spread.whole_stages:
        return "its experts have biases, which SGLang cannot split over ranks; use one GPU per pipeline stage"
    if layout.pp_size > 1 and spread.stages is None:
        return "its model in SGLang does not support pipeline stages"
    if layout.pp_size > 1 and tied and not spread.tied_stages:
        return "its tied output layer would not be updated on the last pipeline stage"
    if layout.whole_dense_mlp and not spread.whole_dense_mlp:
        return "its dense MLP in SGLang ignores moe_dense_tp_size"
    if layout.ep_size > 1 and (num_experts == 0 or num_experts % layout.ep_size):
        return f"its {num_experts} experts cannot be divided evenly among {layout.ep_size} groups"
    return None


LAYER = "{layer}"
"""Placeholder for the layer number in name patterns."""
EXPERT = "{expert}"
"""Placeholder for a routed expert's number in name patterns."""

EMBEDDING = "embedding.word_embeddings.weight"
"""Megatron's name."""
HEAD = "output_layer.weight"
"""Megatron's name."""
ATTENTION = ".self_attention."
"""Part of every attention parameter's name in Megatron, including linear attention."""
DRAFT = "draft."
"""SGLang's prefix for resident tensors of the draft model."""


class Unit(str, Enum):
    """The unit in which a segment is split: ranks get whole units, and engines pad each kind differently."""

    NONE = "none"
    """Replicated on every rank: norms, and biases that are added after the reduction."""
    VOCAB = "vocabulary rows"
    """Padded differently by trainer and engine."""
    HEADS = "attention heads"
    """Query heads."""
    KV_HEADS = "KV heads"
    """Replicated by engines if there are more ranks than heads."""
    FEATURES = "MLP features"
    """Padded by engines on a CPU."""
    EVEN = "features"
    """Anything else; must divide evenly and is never padded."""


@dataclass(frozen=True, slots=True)
class Row:
    """One parameter with its three names. `{layer}` and `{expert}` stand for the layer and routed-expert numbers."""

    megatron: str
    """The parameter's global name in our model."""
    hf: tuple[str, ...]
    """The HF tensors in the parameter, in fusing order."""
    shapes: tuple[tuple[int, ...], ...]
    """Full shape of each HF tensor. If the tensors are `stacked`, the shape of one expert's slice."""
    engine: str
    """The resident tensor in SGLang. Rows and experts with the same resident tensor are stacked along dim 0."""
    dim: int | None = None
    """The dimension that is split over tensor-parallel ranks. None: replicated on every rank."""
    units: tuple[Unit, ...] = ()
    """The unit of each segment."""
    segments: tuple[int, ...] = ()
    """Lengths along `dim` of the segments, which are split separately. Default: one segment per HF tensor."""
    groups: int = 0
    """Number of equal groups in which Megatron interleaves the segments, such as KV heads. 0: one per rank."""
    wide: bool = False
    """Whether the parameter is float32 in trainer, files and engine whatever the training dtype."""
    widened: bool = False
    """Whether newer versions of SGLang hold the parameter in float32, and older ones in the dtype that is sent."""
    stacked: bool = False
    """Whether the HF tensors stack all experts along dim 0."""
    trained: bool = True
    """False for buffers and frozen parameters, which are loaded, exported and synced but not trained."""
    engines: tuple[str, ...] = ()
    """Used instead of `engine` if the engine does not fuse the HF tensors: one resident tensor for each of them."""
    plus_one: str = ""
    """Name of a second resident tensor that holds a zero-centred norm's weight plus one."""
    transposed: bool = False
    """Whether the engine stores the weight as [in, out]."""

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
        """Splits the row into one per HF tensor if `engines` is set, else returns nothing."""
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
    """The model dimensions that determine how tensors are split."""

    num_layers: int
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Megatron's query groups."""
    head_dim: int
    hidden_size: int
    intermediate_size: int
    """Number of MLP features in a dense layer."""
    vocab_size: int
    num_experts: int = 0
    """Number of routed experts in a sparse layer. 0 for a dense model."""
    moe_intermediate_size: int = 0
    """Number of MLP features in one routed expert."""

    @classmethod
    def from_hf(cls, hf_config: HfConfig) -> ModelSizes:
        """Reads the sizes from a `config.json`. Raises `ConfigError` if one is missing or heads cannot be grouped."""
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
            raise ConfigError(f"config.json has no {error}, which the weight table requires; add it") from None
        if sizes.num_heads % sizes.num_kv_heads:
            raise ConfigError(
                f"{sizes.num_kv_heads} KV heads do not divide {sizes.num_heads} attention heads; fix config.json"
            )
        return sizes

    @property
    def heads_per_group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Entry:
    """A row with its layer and expert number filled in."""

    megatron: str
    hf: tuple[str, ...]
    engine: str
    row: Row
    expert: int | None = None
    """Number of the routed expert within its layer. None for all other parameters."""
    apart: tuple[Entry, ...] = ()
    """One entry per resident tensor if the engine has several for this row."""
    plus_one: str = ""
    """Same as `Row.plus_one`."""
    layer: int | None = None
    """Number of the layer. None for parameters before and after the layers."""

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
    """The embedding."""
    layers: tuple[tuple[Row, ...], ...]
    """The rows of each layer, in export order. Optional biases of this model have been resolved."""
    after: tuple[Row, ...]
    """Final norm, output layer."""
    tied: bool
    """Whether the output layer is tied to the embedding and so has no row."""
    mtp: tuple[Row, ...] = ()
    """The rows of the MTP layer if it is trained. In engines, this layer is part of the draft."""
    duplicates: Mapping[str, str] = field(default_factory=dict)
    """Maps the second copy of an HF tensor in a checkpoint to the first. Second copies are never read, and an export
    writes them from the first copy."""
    carried: tuple[str, ...] = ()
    """Patterns (`re.match`) of HF tensors that the trainer does not load and that an export copies from the source, and
    of resident tensors that weight syncs do not send."""
    spread: Spread = PLAIN
    entries: tuple[Entry, ...] = field(init=False, repr=False, compare=False)
    """All rows with layer and expert numbers filled in, in export order."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "entries", tuple(self._expand()))
        for what, names in (
            ("Megatron", [e.megatron for e in self.entries]),
            ("HF", [(name, e.expert if e.row.stacked else None) for e in self.entries for name in e.hf]),
        ):
            doubled = [name for name, count in Counter(names).items() if count > 1]
            assert not doubled, f"table {self.family}: {what} names in two rows: {doubled}"

    def with_rows(self, change: Callable[[Row], Row]) -> FamilyTable:
        """Returns a copy with `change` applied to each row except those of the MTP layer."""
        layers = tuple(tuple(map(change, rows)) for rows in self.layers)
        return replace(
            self, before=tuple(map(change, self.before)), layers=layers, after=tuple(map(change, self.after))
        )

    def _expand(self) -> Iterable[Entry]:
        yield from (Entry.of(row, None) for row in self.before)
        for layer, rows in (*enumerate(self.layers), (None, self.mtp)):
            for row in rows:
                experts = range(self.sizes.num_experts) if EXPERT in row.megatron else (None,)
                yield from (Entry.of(row, layer, expert) for expert in experts)
        yield from (Entry.of(row, None) for row in self.after)

    @cached_property
    def runs(self) -> tuple[tuple[Entry, ...], ...]:
        """The entries in export order, grouped so that all experts of a row and layer form one tuple."""
        out: list[list[Entry]] = []
        for e in self.entries:
            if e.expert:  # expert 0 starts a new run
                out[-1].append(e)
            else:
                out.append([e])
        return tuple(map(tuple, out))

    @cached_property
    def resident(self) -> Mapping[str, tuple[Entry, ...]]:
        """Maps each resident tensor to its entries in stacking order."""
        out: dict[str, list[Entry]] = {}
        for e in self.entries:
            for part in e.apart or (e,):
                out.setdefault(part.engine, []).append(part)
        return {name: tuple(held) for name, held in out.items()}

    @cached_property
    def resident_of(self) -> Mapping[str, str]:
        """Maps each HF tensor to the resident tensor that contains it."""
        return {hf: name for name, held in self.resident.items() for e in held for hf in e.hf}

    @cached_property
    def together(self) -> Mapping[str, str]:
        """Maps HF tensors to their resident tensor if the engine must load tensors of several rows in one call."""
        several = {name: held for name, held in self.resident.items() if len(held) > 1 and held[0].expert is None}
        return {hf: name for name, held in several.items() for e in held for hf in e.hf}

    @cached_property
    def _by_megatron(self) -> Mapping[str, Entry]:
        return {e.megatron: e for e in self.entries}

    @cached_property
    def _by_hf(self) -> Mapping[str, Entry]:
        """Maps each HF tensor to its first entry, because stacked experts share tensors."""
        return {name: e for e in reversed(self.entries) for name in e.hf}

    def entry(self, megatron_name: str) -> Entry:
        """Returns a Megatron parameter's entry. Raises `WeightSyncError` if the table does not contain it."""
        found = self._by_megatron.get(megatron_name)
        if found is None:
            raise WeightSyncError(
                f"the weight table of {self.family!r} with {self.sizes.num_layers} layers does not contain the "
                f"Megatron parameter {megatron_name!r}; the model does not match its HF config"
            )
        return found

    def entry_of_hf(self, hf_name: str) -> Entry:
        """Returns an HF tensor's entry. Raises `WeightSyncError` if the table does not contain it."""
        found = self._by_hf.get(hf_name)
        if found is None:
            raise WeightSyncError(f"the weight table of {self.family!r} does not contain the HF tensor {hf_name!r}")
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
        """Returns the shape of an HF tensor according to config.json."""
        entry = self.entry_of_hf(hf_name)
        shape = entry.row.shapes[entry.hf.index(hf_name)]
        return (self.sizes.num_experts, *shape) if entry.row.stacked else shape

    def carries(self, hf_name: str) -> bool:
        """Returns whether an HF tensor matches `carried`."""
        return any(re.match(pattern, hf_name) for pattern in self.carried)

    def check(self, megatron_names: Iterable[str] | None = None, hf_names: Iterable[str] | None = None) -> None:
        """Raises a `ConfigError` that lists missing, unknown and duplicate tensors of a model or checkpoint.

        Ignores the redundant `lm_head.weight` of tied checkpoints and the rotary buffers of old checkpoints.
        """
        for what, got, known in (("Megatron", megatron_names, self.megatron_names), ("HF", hf_names, self.hf_names)):
            if got is None:
                continue
            names = [n for n in got if what == "Megatron" or not self.ignores(n)]
            missing, unknown = sorted(set(known) - set(names)), sorted(set(names) - set(known))
            doubled = sorted(n for n, count in Counter(names).items() if count > 1)
            if missing or unknown or doubled:
                raise ConfigError(
                    f"the weight table of {self.family!r} needs {len(known)} {what} tensors, but there are "
                    f"{len(names)}: missing {listed(missing)}, unknown {listed(unknown)}, duplicate {listed(doubled)}; "
                    "the model must be built from the same config.json as the table"
                )

    def ignores(self, hf_name: str) -> bool:
        """Returns whether the trainer skips an HF tensor because it is carried, redundant or a rotary buffer."""
        redundant = self.tied and hf_name.endswith("lm_head.weight")
        buffer = hf_name.endswith("rotary_emb.inv_freq")
        return redundant or buffer or hf_name in self.duplicates or self.carries(hf_name)
