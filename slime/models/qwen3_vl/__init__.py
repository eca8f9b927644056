"""Dense Qwen3-VL: Qwen3 with image input through a frozen vision tower."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.core.errors import ConfigError
from slime.core.hf_config import HfConfig
from slime.models import FAMILIES
from slime.models.common.rows import attention, decoder_table, mlp, pre_norm
from slime.models.common.table import PLAIN, FamilyTable, Row, Spread
from slime.models.qwen3 import Qwen3

if TYPE_CHECKING:
    import torch

    from slime.models.common.vision import ImageProcessor, VisionTower
    from slime.settings import Args

LANGUAGE, TOWER = "model.language_model.", r"(model\.)?visual\."
"""Name prefix of the language model in checkpoints, and pattern for the tower's tensors in checkpoints and engines."""
_SPLITS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


@FAMILIES.register("qwen3_vl_text")
class Qwen3VL(Qwen3):
    """The language model (nested as `text_config`) and, with `--multimodal-keys`, the vision tower."""

    shares_prefixes = False
    lends_kernels = False
    sees_images = True

    def check(self, args: Args) -> str | None:
        if args.multimodal_keys is None:
            return None
        split = [f"--{name.replace('_', '-')} {size}" for name in _SPLITS if (size := args.megatron[name] or 1) > 1]
        if not split:
            return None
        return (
            f"--multimodal-keys does not work with {' and '.join(split)}, because with images each rank must have the "
            "full model and full rows; set them to 1 and use more data-parallel ranks"
        )

    def departures(self, hf_config: HfConfig) -> dict[str, Any]:
        if self._sections(hf_config) is None:
            raise ConfigError(
                "mrope_section of Qwen3-VL is missing in config.json or does not divide the rotary frequencies into "
                "three sections; fix config.json"
            )
        return super().departures(hf_config)

    def weight_map(self, hf_config: HfConfig) -> FamilyTable:
        """Returns the weight map. In engines, the language model is at the top level."""
        bias = bool(hf_config.get("attention_bias", False))
        table = decoder_table(
            hf_config,
            lambda s, layer: pre_norm(
                s.hidden_size,
                attention(s, qkv_bias=bias, out_bias=bias, qk_norm=True),
                mlp(s.hidden_size, s.intermediate_size),
            ),
            prefix=LANGUAGE,
            carried=(TOWER,),
            spread=self.spread(hf_config),
        )
        return table.with_rows(_as_served)

    def spread(self, hf_config: HfConfig) -> Spread:
        """Supports only tensor parallelism, because nothing else has been verified with images."""
        return PLAIN

    def rotary_axes(self, hf_config: HfConfig) -> tuple[int, ...] | None:
        """Axes alternate (time, height, width, time, ...) until the height and width sections end. The rest is time."""
        sections = self._sections(hf_config)
        assert sections is not None, "refused by departures"
        return tuple(k % 3 if k < 3 * sections[k % 3] else 0 for k in range(sum(sections)))

    def images(self, hf_config: HfConfig, folder: Path) -> ImageProcessor:
        from slime.models.qwen3_vl.processor import Qwen3VLImages

        return Qwen3VLImages(hf_config, folder)

    def tower(
        self, hf_config: HfConfig, weights: Mapping[str, torch.Tensor], *, dtype: torch.dtype, device: torch.device
    ) -> VisionTower:
        from slime.models.qwen3_vl.layers import Qwen3VLTower

        return Qwen3VLTower(hf_config, weights, dtype=dtype, device=device)

    def layer(self, hf_config: HfConfig, number: int) -> type | None:
        """The first layers add features from deeper layers of the tower."""
        from slime.models.qwen3_vl.layers import SeeingLayer

        deep = (hf_config.get("vision_config") or {}).get("deepstack_visual_indexes") or ()
        return SeeingLayer if number < len(deep) else None

    def _sections(self, hf_config: HfConfig) -> list[int] | None:
        """Returns the number of frequencies for time, height and width; None if transformers cannot read them."""
        rope = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
        sections = rope.get("mrope_section") or ()
        heads = int(hf_config["num_attention_heads"])
        size = int(hf_config.get("head_dim") or int(hf_config["hidden_size"]) // heads)
        fits = len(sections) == 3 and sum(sections) == size // 2 and rope.get("mrope_interleaved", True)
        return list(map(int, sections)) if fits else None


def _as_served(row: Row) -> Row:
    return dataclasses.replace(row, engine=row.engine.replace(LANGUAGE, "model."))
