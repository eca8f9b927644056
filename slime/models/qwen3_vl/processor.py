"""Qwen3-VL's image processing: patches from transformers' PIL processor, and token positions.

The PIL processor does not need torchvision and gives the same numbers on every machine. Engines use it as well
(`--sglang-disable-fast-image-processor`).
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slime.core.errors import ConfigError, DataError
from slime.core.hf_config import HfConfig
from slime.models.common.vision import Int64s

SETTINGS = "preprocessor_config.json"


class Qwen3VLImages:
    """The `ImageProcessor` for a checkpoint."""

    def __init__(self, hf_config: HfConfig, folder: Path) -> None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        path = folder / SETTINGS
        if not path.is_file():
            raise ConfigError(f"--hf-checkpoint {folder} has no {SETTINGS}; download the complete checkpoint")
        self.token_id = int(hf_config["image_token_id"])
        self._processor: Any = Qwen2VLImageProcessorPil(**_settings(path))
        self._merge = int(hf_config["vision_config"]["spatial_merge_size"])

    def num_tokens(self, width: int, height: int) -> int:
        try:
            patches = self._processor.get_number_of_image_patches(height, width, {})
        except ValueError as error:
            raise DataError(f"the model cannot read an image of {width} x {height} pixels: {error}") from error
        return int(patches) // self._merge**2

    def patches(self, images: Sequence[bytes]) -> tuple[npt.NDArray[np.float32], Int64s]:
        from PIL import Image

        opened = [Image.open(io.BytesIO(image)).convert("RGB") for image in images]
        found = self._processor(opened, return_tensors="np")
        return np.asarray(found["pixel_values"], np.float32), np.asarray(found["image_grid_thw"], np.int64)

    def tokens_of(self, grids: Int64s) -> Int64s:
        return grids.prod(axis=1) // self._merge**2

    def positions(self, starts: Int64s, grids: Int64s, num_tokens: int) -> Int64s:
        """All tokens of an image have the same time. Text positions continue after the image's longer side."""
        out = np.empty((3, num_tokens), np.int64)
        at = place = 0
        for start, (time, height, width) in zip(starts.tolist(), grids.tolist(), strict=True):
            out[:, at:start] = place + np.arange(start - at)
            place += start - at
            grid = np.indices((time, height // self._merge, width // self._merge)).reshape(3, -1)
            at = start + grid.shape[1]
            out[:, start:at] = place + grid
            place += max(grid[1, -1], grid[2, -1]) + 1
        out[:, at:] = place + np.arange(num_tokens - at)
        return out


def _settings(path: Path) -> dict[str, Any]:
    """Reads the settings from the file, without class names."""
    settings = json.loads(path.read_text())
    return {name: value for name, value in settings.items() if not name.endswith(("_type", "_class"))}
