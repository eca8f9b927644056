"""Endless iteration over a dataset: every row once per epoch, in an order determined by seed and epoch.

Invariants
1. Epoch `e` visits each row exactly once. With shuffling, a generator seeded with `seed + e` determines the order.
2. A walk restored to (`epoch`, `offset`) over the same dataset continues identically.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from slime.core.errors import CheckpointError, DataError
from slime.core.files import ImageFolder
from slime.core.hf_config import read_hf_config
from slime.core.sample import Fingerprint, PromptRow
from slime.data.images import ImageColumn
from slime.models import family_of
from slime.settings import Args
from slime.settings.groups.data import KIND


class Prompts(Protocol):
    """A dataset, such as `slime.data.dataset.PromptDataset`."""

    @property
    def fingerprint(self) -> Fingerprint: ...

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> PromptRow: ...


class PromptWalk:
    """A cursor into an endless sequence of epochs over `prompts`."""

    def __init__(self, prompts: Prompts, *, shuffle: bool, seed: int) -> None:
        """Raises `DataError` on an empty dataset."""
        if len(prompts) == 0:
            raise DataError("the dataset has no rows; use a dataset with at least one")
        self.prompts = prompts
        self.epoch = 0
        self.offset = 0
        self._shuffle = shuffle
        self._seed = seed
        self._order_of: tuple[int, npt.NDArray[np.int64]] | None = None

    def next_row(self) -> int:
        """Returns the index of the next row and advances the cursor."""
        row = int(self._order()[self.offset])
        self.offset += 1
        if self.offset == len(self.prompts):
            self.epoch, self.offset = self.epoch + 1, 0
        return row

    def _order(self) -> npt.NDArray[np.int64]:
        """Returns the row indices of the current epoch, [num_rows]."""
        if self._order_of is None or self._order_of[0] != self.epoch:
            num_rows = len(self.prompts)
            rows = np.arange(num_rows, dtype=np.int64)
            if self._shuffle:
                rows = np.random.default_rng(self._seed + self.epoch).permutation(num_rows).astype(np.int64)
            self._order_of = (self.epoch, rows)
        return self._order_of[1]

    def _order_digest(self) -> str:
        return hashlib.sha256(self._order().tobytes()).hexdigest()[:16]

    def state_dict(self) -> dict[str, Any]:
        """Returns the position and the fingerprints of dataset and order, as a JSON-serializable dict."""
        return {
            "epoch": self.epoch,
            "offset": self.offset,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "order_digest": self._order_digest(),
            "fingerprint": self.prompts.fingerprint.to_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves to a saved position. Raises `CheckpointError` if the dataset or its order has changed."""
        saved, here = Fingerprint.from_dict(state["fingerprint"]), self.prompts.fingerprint
        if not saved.same_data(here):
            raise CheckpointError(
                f"the dataset has {here.num_rows} rows ({here.source}, {here.digest[:12]}), but the checkpoint was "
                f"saved with {saved.num_rows} rows ({saved.source}, {saved.digest[:12]}). The file, its slice, the "
                "template or a filter has changed, and resuming would skip or repeat prompts; restore the original "
                "data, or start a new run from the saved weights"
            )
        if (state["shuffle"], state["seed"]) != (self._shuffle, self._seed):
            raise CheckpointError(
                f"this run has shuffle={self._shuffle} seed={self._seed}, but the checkpoint was saved with "
                f"shuffle={state['shuffle']} seed={state['seed']}. A different order would skip or repeat prompts; "
                "resume with the saved --rollout-shuffle and --rollout-seed"
            )
        self.epoch, self.offset = int(state["epoch"]), int(state["offset"])
        if self._order_digest() != state["order_digest"]:
            raise CheckpointError(
                "the same seed no longer produces the row order of the checkpoint, because NumPy's generator has "
                "changed; resume with the NumPy version that saved the checkpoint"
            )


def image_column(args: Args) -> ImageColumn | None:
    """Returns the column of `--multimodal-keys`; None if unset. Raises `ConfigError` if the model takes no images."""
    if args.multimodal_keys is None:
        return None
    config, folder = read_hf_config(args.hf_checkpoint), Path(args.hf_checkpoint)
    kept = ImageFolder.of_run(args.run_dir)
    return ImageColumn(args.multimodal_keys[KIND], family_of(config).images(config, folder), kept)
