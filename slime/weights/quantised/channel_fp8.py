"""FP8 with a scale for each output feature, as compressed-tensors writes it (`float-quantized`; GLM-4.5-FP8).

`<module>.weight` in e4m3 beside `weight_scale` [out, 1]: the row's largest entry / 448, and the quotients rounded to
the nearest code; in the dtype of the weight, as compressed-tensors has it. Engines keep scales in float32, in which
they are sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.core.errors import CheckpointError, ConfigError
from slime.models.common.table import Row
from slime.weights.quantised.block_fp8 import E4M3_MAX
from slime.weights.quantised.format import WHOLE, QuantisedFormat, require_finite

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SCALE = "weight_scale"
"""Name in the files, beside `weight`."""


def require_channels(quantisation: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for a `float-quantized` checkpoint that is not e4m3 with a scale for each output feature."""
    found = [group.get("weights") or {} for group in (quantisation.get("config_groups") or {}).values()]
    want = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    if not found or any(weights.get(key) != value for weights in found for key, value in want.items()):
        raise ConfigError(
            f"got a compressed-tensors checkpoint of {found}; slime reads FP8 with a scale for each output feature, "
            "and symmetric INT4 in groups; choose such a checkpoint or one in bfloat16"
        )


@dataclass(frozen=True)
class ChannelFp8(QuantisedFormat):
    """e4m3 codes, and a scale for each row."""

    @property
    def title(self) -> str:
        return "FP8 in rows"

    @property
    def block(self) -> tuple[int, int]:
        return 1, WHOLE

    def parts_of(self, hf_name: str) -> tuple[str, ...]:
        return hf_name, hf_name.removesuffix("weight") + SCALE

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        import torch

        return torch.float8_e4m3fn, torch.float32

    def quantise(self, weights: Tensor) -> tuple[Tensor, ...]:
        import torch

        scales = weights.abs().amax(-1, keepdim=True) / E4M3_MAX
        scales = torch.where(scales == 0, torch.finfo(scales.dtype).eps, scales)
        require_finite(scales, weights, "FP8")
        codes = (weights / scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return codes, scales.float()

    def dequantise(self, parts: Sequence[Tensor]) -> Tensor:
        codes, scales = parts
        if list(scales.shape) != [*codes.shape[:-1], 1]:
            raise CheckpointError(
                f"got scales {list(scales.shape)} of a weight {list(codes.shape)}, which needs one for each row; "
                "config.json does not belong to these files"
            )
        return codes.float() * scales.float()

    def rows(self, row: Row) -> tuple[Row, ...]:
        self.require_linear(row)
        split = row.dim == 0
        scales = dataclasses.replace(
            row,
            megatron=row.megatron + SCALE.removeprefix("weight"),
            hf=tuple(name.removesuffix("weight") + SCALE for name in row.hf),
            shapes=tuple((out, 1) for out, _ in row.shapes),
            dim=0 if split else None,
            units=row.units if split else (),
            segments=row.segments if split else (),
            engine=row.engine.removesuffix("weight") + SCALE,
            engines=tuple(name.removesuffix("weight") + SCALE for name in row.engines),
            wide=True,
        )
        return row, scales
