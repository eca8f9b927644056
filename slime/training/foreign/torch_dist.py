"""Reads a Megatron-core `torch_dist` folder as Hugging Face tensors, using the family's weight table.

Tensor names in a checkpoint differ from the model's parameter names. Layers and experts either have separate tensors
(`decoder.layers.3.`, `experts.experts.5.`) or are stacked along a leading axis of one tensor. If Transformer Engine
fuses a norm into the next linear layer, the norm's name starts with that layer's name. The gate and up projections of
an MLP can be one tensor or two.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slime.core.errors import CheckpointError
from slime.core.hf_config import HfConfig
from slime.core.text import listed
from slime.models import table_for
from slime.models.common.mtp import PREFIX, with_mtp
from slime.models.common.table import Entry, FamilyTable, Unit
from slime.training.foreign.reader import Folder
from slime.training.state.shards import DTYPES, iter_full

_FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.",
    "pre_mlp_layernorm.": "mlp.linear_fc1.",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.",
}
"""Norm -> the linear layer that Transformer Engine fuses it into."""
_LAYER, _LAYERS = re.compile(r"^decoder\.layers\.(\d+)\."), "decoder.layers."
_EXPERT, _EXPERTS = re.compile(r"\.experts\.local_experts\.(\d+)\."), ".experts.experts."
_GATED = re.compile(r"\.linear_fc1\.(weight|bias)$")
_NOT_WEIGHTS = re.compile(r"^(chained_\d+\.)?optimizer\.|^rng_state|^rerun_state_machine|\._extra_state(/|$)")


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in a checkpoint, or a slice of a stacked tensor."""

    key: str
    at: tuple[int, ...] = ()
    """Indices along the leading axes: layer, expert."""


class Places:
    """Maps a model's parameters to their places in a checkpoint."""

    def __init__(self, table: FamilyTable) -> None:
        self._own = frozenset(table.megatron_names)

    def find(self, parameter: str, stored: Container[str]) -> tuple[Place, ...]:
        """Returns the places of `parameter` in a checkpoint with the tensor names `stored`, or () if it is missing.

        If there are several places, the parameter is the concatenation of their tensors.
        """
        return next((form for form in self.forms(parameter) if all(place.key in stored for place in form)), ())

    def written(self, parameter: str) -> Place:
        """Returns the place to write to. Layers are separate, experts are stacked, and norms have fused names."""
        fused, linear = _fused(parameter)
        name = fused if linear in self._own else parameter
        *_, (key, at) = _unstacked(name, _EXPERT, _EXPERTS)
        return Place(key, at)

    def forms(self, parameter: str) -> Iterator[tuple[Place, ...]]:
        for name in dict.fromkeys((parameter, _fused(parameter)[0])):
            for key, layer in _unstacked(name, _LAYER, _LAYERS):
                for stored, expert in _unstacked(key, _EXPERT, _EXPERTS):
                    at = layer + expert
                    yield (Place(stored, at),)
                    if _GATED.search(stored):
                        yield Place(f"{stored}_w", at), Place(f"{stored}_v", at)


def _fused(parameter: str) -> tuple[str, str]:
    """Returns a norm's name when it is fused into the next linear layer, and the name of that layer's weight. Returns
    other parameters unchanged, with "". In layers with experts, Megatron's local layers use the fused name as well.
    """
    for norm, linear in _FUSED.items():
        prefix, found, kind = parameter.rpartition(norm)
        if found:
            return f"{prefix}{linear}layer_norm_{kind}", f"{prefix}{linear}weight"
    return parameter, ""


def is_weight(key: str) -> bool:
    """Returns whether a tensor belongs to the model rather than to the optimizer or the run state."""
    return not _NOT_WEIGHTS.search(key)


def _unstacked(name: str, pattern: re.Pattern[str], stack: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields (name, indices along the leading axis) for all ways to store `name`: as it is, then in stacked tensors."""
    found = pattern.search(name)
    yield name, ()
    if found is None:
        return
    before, number, behind = name[: found.start()], found[1], name[found.end() :]
    if pattern is _EXPERT:
        yield f"{before}{stack}{number}.{behind}", ()
    yield f"{before}{stack}{behind}", (int(number),)


TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"
"""Megatron's file with the iteration of the newest checkpoint, or `RELEASE` for one that was not saved by training."""
METADATA = ".metadata"


def checkpoint_in(folder: Path) -> Path | None:
    """Returns the folder with the tensors: `folder` itself or the one in its tracker, or None if there is neither."""
    if (folder / METADATA).is_file():
        return folder
    tracker = folder / TRACKER
    if not tracker.is_file():
        return None
    said = tracker.read_text(encoding="utf-8", errors="replace").strip()
    number = re.fullmatch(r"\d{1,12}", said)
    found = folder / (f"iter_{int(said):07d}" if number else RELEASE)
    if (said == RELEASE or number) and (found / METADATA).is_file():
        return found
    raise CheckpointError(
        f"{tracker} says {said[:40]!r}, but {found / METADATA} does not exist: the newest checkpoint is missing or is "
        "not in the torch_dist format; pass the folder of a different checkpoint"
    )


class TorchDist:
    """An open `torch_dist` folder whose weights match the model exactly.

    Raises `CheckpointError` for a weight that is missing, unknown or of the wrong shape before any tensor is read.
    """

    table: FamilyTable
    """The model's table, including the MTP layer if the folder has one."""

    def __init__(self, folder: Path, hf_config: HfConfig) -> None:
        self._path, self._folder = folder, Folder(folder)
        stored = {name for name in self._folder.tensors if is_weight(name)}
        trained = any(name.startswith(PREFIX) for name in stored)
        self.table = table_for(with_mtp(hf_config) if trained else hf_config)
        places = Places(self.table)
        self._places = {entry.megatron: places.find(entry.megatron, stored) for entry in self.table.entries}
        self._require_whole(stored)
        for entry in self.table.entries:
            self._require_shape(entry)

    def iter_hf(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (HF name, full tensor) in table order, one at a time, in the stored dtypes."""
        return iter_full(self.table, lambda entry: [self._parameter(entry)])

    def _parameter(self, entry: Entry) -> Tensor:
        """Returns the full parameter. Its vocabulary dimension can include padding."""
        parts = [self._folder.tensor(place.key, place.at) for place in self._places[entry.megatron]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _require_shape(self, entry: Entry) -> None:
        places = self._places[entry.megatron]
        shapes = [self._shape(place.key)[len(place.at) :] for place in places]
        row, got = entry.row, [sum(shape[0] for shape in shapes), *shapes[0][1:]] if shapes[0] else []
        wanted = list(row.shapes[0])
        if row.dim is not None:
            wanted[row.dim] = sum(shape[row.dim] for shape in row.shapes)
        padded = row.units == (Unit.VOCAB,) and got[1:] == wanted[1:] and got[0] > wanted[0]
        if got != wanted and not padded:
            keys = ", ".join(place.key for place in places)
            raise CheckpointError(
                f"{keys} in {self._path} has the shape {got}, but config.json implies {wanted}; set --hf-checkpoint to "
                "the model that the folder was saved from"
            )

    def _require_whole(self, stored: set[str]) -> None:
        missing = [name for name, found in self._places.items() if not all(map(self._has, found or (None,)))]
        used = Counter(place.key for found in self._places.values() for place in set(found))
        axes = {place.key: len(place.at) for found in self._places.values() for place in found}
        unknown = [name for name in stored if name not in used]
        unknown += [f"{name} beyond {n}" for name, n in used.items() if self._count(name, axes[name]) > n]
        if missing or unknown:
            raise CheckpointError(
                f"{self._path} has {len(stored)} weight tensors that do not match a {self.table.family} model with "
                f"{self.table.sizes.num_layers} layers: missing {listed(missing)}, unknown {listed(sorted(unknown))}; "
                "set --hf-checkpoint to the model that the folder was saved from"
            )
        for name, (kind, _) in self._folder.tensors.items():
            if name in used and kind not in DTYPES.values():
                raise CheckpointError(
                    f"{name} in {self._path} has the dtype {kind}, which is not supported for weights"
                )

    def _shape(self, key: str) -> tuple[int, ...]:
        return self._folder.tensors[key][1]

    def _count(self, key: str, axes: int) -> int:
        return math.prod(self._shape(key)[:axes])

    def _has(self, place: Place | None) -> bool:
        """Returns whether the folder contains `place`, including its index in a stack."""
        if place is None:
            return False
        shape = self._shape(place.key)
        return len(place.at) <= len(shape) and all(i < n for i, n in zip(place.at, shape, strict=False))
