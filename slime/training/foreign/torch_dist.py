"""Weights of a Megatron-core `torch_dist` folder, as Hugging Face tensors: through the family's own weight table."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from slime.core.errors import CheckpointError
from slime.core.hf_config import HfConfig
from slime.models import table_for
from slime.models.common.mtp import PREFIX, with_mtp
from slime.models.common.table import Entry, FamilyTable, Unit, some_of
from slime.training.foreign.confined import Confined
from slime.training.foreign.names import Place, Places, is_weight
from slime.training.state.shards import iter_full

TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"
"""Megatron's file that names the newest checkpoint, by its number, and what it says of one that no training made."""
METADATA = ".metadata"


def checkpoint_in(folder: Path) -> Path | None:
    """Where the tensors are: `folder` itself, or the one that its tracker names; None if it is not a `torch_dist`."""
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
        f"got {tracker}, which says {said[:40]!r}, and no {found / METADATA}: the newest checkpoint is missing, or not "
        "of the format torch_dist; name the folder of another one"
    )


class TorchDist:
    """An opened folder: every parameter of the model is there, in its shape, and no weight besides.

    Raises `CheckpointError` before a tensor is read.
    """

    table: FamilyTable
    """With the layer of multi-token prediction if the folder has it."""

    def __init__(self, confined: Confined, folder: Path, hf_config: HfConfig) -> None:
        self._confined, self._folder = confined, folder
        stored = {name for name in confined.content if is_weight(name)}
        trained = any(name.startswith(PREFIX) for name in stored)
        self.table = table_for(with_mtp(hf_config) if trained else hf_config)
        places = Places(self.table)
        self._places = {entry.megatron: places.find(entry.megatron, stored) for entry in self.table.entries}
        self._require_whole(stored)
        for entry in self.table.entries:
            self._require_shape(entry)

    def iter_hf(self) -> Iterator[tuple[str, Tensor]]:
        """(HF name, full tensor) in table order, one at a time, in the types that are stored."""
        return iter_full(self.table, lambda entry: [self._parameter(entry)])

    def _parameter(self, entry: Entry) -> Tensor:
        """As the only one of its tensor-parallel ranks would hold it; a vocabulary may be padded."""
        parts = [self._confined.tensor(place.key, place.at) for place in self._places[entry.megatron]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _require_shape(self, entry: Entry) -> None:
        """A parameter, whose parts lie end to end, is as large as config.json says."""
        places = self._places[entry.megatron]
        shapes = [self._confined.content[place.key][1][len(place.at) :] for place in places]
        row, got = entry.row, [sum(shape[0] for shape in shapes), *shapes[0][1:]] if shapes[0] else []
        wanted = list(row.shapes[0])
        if row.dim is not None:
            wanted[row.dim] = sum(shape[row.dim] for shape in row.shapes)
        padded = row.units == (Unit.VOCAB,) and got[1:] == wanted[1:] and got[0] > wanted[0]
        if got != wanted and not padded:
            said = ", ".join(place.key for place in places)
            raise CheckpointError(
                f"got {said} of shape {got} in {self._folder}; config.json implies {wanted}; checkpoint and "
                "--hf-checkpoint do not belong together"
            )

    def _require_whole(self, stored: set[str]) -> None:
        missing = [name for name, found in self._places.items() if not all(map(self._has, found or (None,)))]
        used = Counter(place.key for found in self._places.values() for place in set(found))
        axes = {place.key: len(place.at) for found in self._places.values() for place in found}
        unknown = [name for name in stored if name not in used]
        unknown += [f"{name} beyond {n}" for name, n in used.items() if self._count(name, axes[name]) > n]
        if missing or unknown:
            raise CheckpointError(
                f"got {self._folder} with {len(stored)} tensors of weights, which are not those of a "
                f"{self.table.family} of {self.table.sizes.num_layers} layers: missing {some_of(missing)}, unknown "
                f"{some_of(sorted(unknown))}; give the --hf-checkpoint that it was made of"
            )

    def _count(self, key: str, axes: int) -> int:
        """How many tensors are stacked on the leading axes of one."""
        return math.prod(self._confined.content[key][1][:axes])

    def _has(self, place: Place | None) -> bool:
        """Whether it is stored; of a stack, whether the axes have these numbers."""
        if place is None:
            return False
        shape = self._confined.content[place.key][1]
        return len(place.at) <= len(shape) and all(i < n for i, n in zip(place.at, shape, strict=False))
