"""What a training rank sees of a batch's images: the vision tower and processor that it has, and patches and places for
each micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slime.core.batch import TrainBatch, TrainSample
from slime.core.errors import ConfigError, DataError
from slime.core.files import ImageFolder
from slime.core.hf_config import HfConfig
from slime.core.ports import Digest
from slime.data.packing import PackedBatch
from slime.models import family_of, table_for
from slime.models.common.vision import ImageProcessor, Int64s, RowImages, VisionTower
from slime.settings import Args
from slime.training.model.megatron_config import training_dtype
from slime.training.model.policy import PolicyModel
from slime.training.state.hf_files import HfReader

# The images of a batch, for the passes over it: patches and places on the host, when a micro-batch is made.
#
# Samples name their images. A micro-batch reads each of its different images once, and the tower sees it once; the
# placeholders of all samples that have it point at the same features.
#
# Invariants
# 1. A placeholder is one of the prompt: the first ones of a sample, as many as its images have. The same id further on,
#    which a model may sample, is text.
# 2. Without images in a batch there is nothing here, and passes are what they always were.

_NAMES = ("pixels", "rows", "features", "positions")


@dataclass(frozen=True, slots=True)
class RowPictures:
    """What a packed row shows, on the host."""

    grids: Int64s
    """[N, 3] of its different images."""
    arrays: dict[str, npt.NDArray[Any]]
    """What the device needs, by name."""

    def on_device(self, tensors: Mapping[str, Tensor]) -> RowImages:
        """`tensors`: those of `arrays`, among others."""
        pixels, rows, features, positions = (tensors[f"images/{name}"] for name in _NAMES)
        return RowImages(pixels, torch.from_numpy(self.grids), rows, features, positions)


@dataclass(frozen=True, slots=True)
class BatchImages:
    """Where the passes over a batch find its images."""

    folder: ImageFolder
    processor: ImageProcessor

    @classmethod
    def of(cls, batch: TrainBatch, folder: ImageFolder, processor: ImageProcessor | None) -> BatchImages | None:
        """None if no sample has any. Raises `ConfigError` if nothing can read them."""
        if not any(s.images for s in batch.samples):
            return None
        if processor is None:
            raise ConfigError(f"got step {batch.rollout_id} with images, which nothing can read; add --multimodal-keys")
        return cls(folder, processor)

    def row(self, samples: Sequence[TrainSample], row: PackedBatch, own: Int64s) -> RowPictures | None:
        """Of a micro-batch of these samples; None if they have no images. `own` [T]: where tokens stand in theirs.

        Raises `DataError` for a prompt whose placeholders are not those of its images.
        """
        digests = list(dict.fromkeys(digest for s in samples for digest in s.images))
        if not digests:
            return None
        pixels, grids = self.processor.patches([self.folder.read(digest) for digest in digests])
        counts = self.processor.tokens_of(grids)
        begins = np.concatenate([[0], np.cumsum(counts)])
        positions = np.tile(own, (3, 1))
        rows, features = [], []
        for sample, places in zip(samples, row.token_rows, strict=True):
            which = [digests.index(digest) for digest in sample.images]
            if not which:
                continue
            starts = placeholder_starts(sample, self.processor.token_id, counts[which])
            positions[:, places] = self.processor.positions(starts, grids[which], sample.num_tokens)
            for start, image in zip(starts.tolist(), which, strict=True):
                rows.append(places[start : start + counts[image]])
                features.append(np.arange(begins[image], begins[image + 1]))
        arrays: tuple[npt.NDArray[Any], ...] = (pixels, np.concatenate(rows), np.concatenate(features), positions)
        return RowPictures(grids, {f"images/{name}": array for name, array in zip(_NAMES, arrays, strict=True)})


def placeholder_starts(sample: TrainSample, token_id: int, counts: Int64s) -> Int64s:
    """[N] where in a sample the placeholders of its images begin, which have `counts` [N] of them.

    Raises `DataError` if there are others.
    """
    places = np.flatnonzero(sample.tokens == token_id)[: int(counts.sum())]
    ends = np.cumsum(counts)
    runs = np.split(places, ends[:-1]) if len(places) == ends[-1] else []
    prompt = sample.num_tokens - sample.response_length
    if not runs or places[-1] >= prompt or any(run[-1] - run[0] + 1 != len(run) for run in runs):
        raise DataError(
            f"sample {sample.index}: {len(places)} placeholders in a prompt of {prompt} tokens for images that are "
            f"read as {counts.tolist()} tokens, because it was made with another processor or other images; do: let "
            "the data set expand them, and keep the tokens of the prompt"
        )
    return places[ends - counts]


# A rank's eyes: the vision tower that its policy has, and the processor that makes patches of a batch's images.


@dataclass(frozen=True, slots=True)
class Sight:
    """Both are None without `--multimodal-keys`."""

    folder: ImageFolder
    processor: ImageProcessor | None = None
    tower: VisionTower | None = None

    @classmethod
    def of(cls, args: Args, hf_config: HfConfig, chunks: Sequence[PolicyModel], device: torch.device) -> Sight:
        """Reads the tower of `--hf-checkpoint` and gives it to the model. Raises `CheckpointError` or `ConfigError`."""
        folder = ImageFolder.of_run(args.run_dir)
        if args.multimodal_keys is None:
            return cls(folder)
        source, family, table = Path(args.hf_checkpoint), family_of(hf_config), table_for(hf_config)
        with HfReader(source) as read:
            weights = {name: read(name) for name in read.names if table.carries(name)}
            tower = family.tower(hf_config, weights, dtype=training_dtype(args.megatron), device=device)
        for chunk in chunks:
            chunk.tower = tower
        return cls(folder, family.images(hf_config, source), tower)

    def of_batch(self, batch: TrainBatch) -> BatchImages | None:
        """For `PreparedBatch`. Raises as `BatchImages.of`."""
        return BatchImages.of(batch, self.folder, self.processor)

    def digests(self, dtype: torch.dtype, digest: Digest) -> dict[str, str]:
        """Resident name -> digest of what an engine of one rank has to hold of the tower; empty without one."""
        return {} if self.tower is None else {name: digest(held) for name, held in self.tower.resident(dtype)}

    def close(self) -> None:
        """The trainer sleeps: nothing of the tower stays on a GPU."""
        if self.tower is not None:
            self.tower.leave()
