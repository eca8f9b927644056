"""A rank's eyes: the vision tower that its policy has, and the processor that makes patches of a batch's images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from slime.core.batch import TrainBatch
from slime.core.files import ImageFolder
from slime.core.hf_config import HfConfig
from slime.core.ports import Digest
from slime.models import family_of, table_for
from slime.models.common.vision import ImageProcessor, VisionTower
from slime.settings import Args
from slime.training.model.config import training_dtype
from slime.training.model.policy import PolicyModel
from slime.training.state.hf_files import HfReader
from slime.training.step.images import BatchImages


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
