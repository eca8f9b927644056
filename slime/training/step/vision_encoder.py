"""The images of a batch on a training rank: vision tower, image processor, and each micro-batch's patches.

Patches and their positions are computed on the host when a micro-batch is built. A micro-batch reads and encodes each
distinct image once, and all samples with that image share its features.

Invariants
1. If a sample's images need n tokens, its first n tokens with the placeholder id that no engine sampled are
   placeholders. Others are text, because a model can sample the id.
2. Batches without images are unaffected.
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
from slime.core.engine_interface import Digest
from slime.core.errors import ConfigError, DataError
from slime.core.files import ImageFolder
from slime.core.hf_config import HfConfig
from slime.core.sample import NOT_SAMPLED
from slime.data.packing import PackedBatch
from slime.models import family_of, table_for
from slime.models.common.vision import ImageProcessor, Int64s, RowImages, VisionTower
from slime.settings import Args
from slime.training.model.megatron_config import training_dtype
from slime.training.model.policy_model import PolicyModel
from slime.training.state.hf_files import HfReader

_NAMES = ("pixels", "rows", "features", "positions")


@dataclass(frozen=True, slots=True)
class RowPictures:
    """A packed row's images, on the host."""

    grids: Int64s
    """[N, 3], one row per distinct image."""
    arrays: dict[str, npt.NDArray[Any]]

    def on_device(self, tensors: Mapping[str, Tensor]) -> RowImages:
        """Returns the images on the device. `tensors` must contain the device copies of `arrays`."""
        pixels, rows, features, positions = (tensors[f"images/{name}"] for name in _NAMES)
        return RowImages(pixels, torch.from_numpy(self.grids), rows, features, positions)


def placeholder_starts(sample: TrainSample, token_id: int, counts: Int64s) -> Int64s:
    """Returns where each image's placeholders start in the sample, [N]. `counts` [N]: placeholders per image.

    Raises `DataError` if the sample's placeholders do not match `counts`.
    """
    prompt = sample.num_tokens - sample.response_length
    read = np.arange(sample.num_tokens) < prompt
    read[prompt:] = sample.token_versions == NOT_SAMPLED  # user code may add images behind the prompt
    places = np.flatnonzero((sample.tokens == token_id) & read)[: int(counts.sum())]
    ends = np.cumsum(counts)
    runs = np.split(places, ends[:-1]) if len(places) == ends[-1] else []
    if not runs or any(run[-1] - run[0] + 1 != len(run) for run in runs):
        raise DataError(
            f"sample {sample.index} has {len(places)} placeholders that no engine sampled, but its images need "
            f"{counts.tolist()} tokens: a different processor or different images were used; let the dataset expand "
            "the placeholders, and do not change the prompt's tokens"
        )
    return places[ends - counts]


@dataclass(frozen=True, slots=True)
class Sight:
    """A rank's vision tower and image processor. Both are None without `--multimodal-keys`."""

    folder: ImageFolder
    processor: ImageProcessor | None = None
    tower: VisionTower | None = None

    @classmethod
    def of(cls, args: Args, hf_config: HfConfig, chunks: Sequence[PolicyModel], device: torch.device) -> Sight:
        """Loads the vision tower of `--hf-checkpoint` into the model. Raises `CheckpointError` or `ConfigError`."""
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

    def of_batch(self, batch: TrainBatch) -> Sight | None:
        """Returns this object if the batch has images, else None. Raises `ConfigError` if there is no processor."""
        if not any(s.images for s in batch.samples):
            return None
        if self.processor is None:
            raise ConfigError(f"step {batch.rollout_id} has images, but there is no processor; set --multimodal-keys")
        return self

    def row(self, samples: Sequence[TrainSample], row: PackedBatch, own: Int64s) -> RowPictures | None:
        """Returns a micro-batch's images, or None if it has none. `own` [T]: each token's position in its sample.

        Raises `DataError` if a prompt's placeholders do not match its images.
        """
        digests = list(dict.fromkeys(digest for s in samples for digest in s.images))
        if not digests:
            return None
        assert self.processor is not None, "`of_batch` checks this"
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

    def digests(self, dtype: torch.dtype, digest: Digest) -> dict[str, str]:
        """Returns the digests of the tower's tensors, by their names in a single-rank engine; {} without a tower."""
        return {} if self.tower is None else {name: digest(held) for name, held in self.tower.resident(dtype)}

    def close(self) -> None:
        """Frees the tower's GPU memory while the trainer sleeps."""
        if self.tower is not None:
            self.tower.leave()
