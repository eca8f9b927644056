"""INT4 in groups of input features, as compressed-tensors packs it (`pack-quantized`, symmetric), in its arithmetic.

`<module>.weight_packed` holds eight codes in an int32, the first one in the lowest bits, each as code + 8;
`weight_scale` a scale for each group: its largest entry / 7.5, all of it in the dtype of the weight, which for the same
bits has to be that of the engine. What a file says in `weight_shape` besides, an engine has from config.json and is not
sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.core.errors import CheckpointError, ConfigError
from slime.models.common.table import EXPERT, Row
from slime.weights.quantised.format import QuantisedFormat, require_finite

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PACKED, SCALE, SHAPE = "weight_packed", "weight_scale", "weight_shape"
"""Names in the files, in place of `weight`."""
PER_WORD = 8
"""Codes in an int32."""
BITS = 4
LOWEST, HIGHEST = -8, 7
"""Codes."""


def group_of(quantisation: Mapping[str, Any]) -> int:
    """Group size of a compressed-tensors checkpoint. Raises `ConfigError` for anything but symmetric INT4 in groups."""
    groups = list((quantisation.get("config_groups") or {}).values())
    found = [g.get("weights") or {} for g in groups]
    want = {"num_bits": BITS, "type": "int", "symmetric": True, "strategy": "group"}
    plain = [g for g in found if all(g.get(key) == value for key, value in want.items()) and not g.get("actorder")]
    sizes = {int(g["group_size"]) for g in plain if g.get("group_size")}
    activations = any(g.get("input_activations") for g in groups)
    if len(plain) != len(found) or len(sizes) != 1 or activations or min(sizes) % PER_WORD:
        raise ConfigError(
            f"got a compressed-tensors checkpoint of {found}; slime reads symmetric INT4 in groups of one size, "
            "without quantised activations or activation order; choose such a checkpoint or one in bfloat16"
        )
    return sizes.pop()


@dataclass(frozen=True)
class GroupedInt4(QuantisedFormat):
    """Packed codes, and scales of groups."""

    group: int
    """Neighbouring input features that share a scale."""

    @property
    def title(self) -> str:
        return f"INT4 in groups of {self.group}"

    @property
    def block(self) -> tuple[int, int]:
        return 1, self.group

    def parts_of(self, hf_name: str) -> tuple[str, ...]:
        module = hf_name.removesuffix("weight")
        return module + PACKED, module + SCALE

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        import torch

        return torch.int32, torch.bfloat16

    def about(self, hf_name: str) -> str | None:
        return hf_name.removesuffix("weight") + SHAPE

    def quantise(self, weights: Tensor) -> tuple[Tensor, ...]:
        import torch

        size = weights.shape[-1]
        if size % self.group:
            raise CheckpointError(f"got a weight of {size} input features, which groups of {self.group} do not divide")
        groups = weights.unflatten(-1, (-1, self.group))
        scales = groups.abs().amax(-1) / ((HIGHEST - LOWEST) / 2)
        scales = torch.where(scales == 0, torch.finfo(scales.dtype).eps, scales)
        require_finite(scales, weights, "INT4")
        codes = (groups / scales.unsqueeze(-1)).clamp(LOWEST, HIGHEST).round().to(torch.int32) - LOWEST
        words = codes.flatten(-2).unflatten(-1, (-1, PER_WORD))
        shifts = torch.arange(0, 32, BITS, dtype=torch.int32, device=weights.device)
        packed = (words << shifts).sum(-1, dtype=torch.int32)  # bits of different codes never meet
        return packed, scales

    def dequantise(self, parts: Sequence[Tensor]) -> Tensor:
        import torch

        packed, scales = parts[0], parts[1]
        *lead, words = packed.shape
        if list(scales.shape) != [*lead, words * PER_WORD // self.group] or packed.dtype is not torch.int32:
            raise CheckpointError(
                f"got scales {list(scales.shape)} of packed {packed.dtype} {list(packed.shape)} in groups of "
                f"{self.group}; config.json does not belong to these files"
            )
        shifts = torch.arange(0, 32, BITS, dtype=torch.int32, device=packed.device)
        codes = ((packed.unsqueeze(-1) >> shifts) & 0xF) + LOWEST
        groups = codes.flatten(-2).unflatten(-1, (-1, self.group)).float() * scales.float().unsqueeze(-1)
        return groups.flatten(-2)

    def rows(self, row: Row) -> tuple[Row, ...]:
        self.require_linear(row)
        inputs = {shape[1] for shape in row.shapes} | (set(row.segments) if row.dim == 1 else set())
        if any(size % self.group for size in inputs):
            raise ConfigError(f"got {row.hf[0]} of {sorted(inputs)} input features in {self.title}; they must divide")
        return tuple(
            dataclasses.replace(
                row,
                megatron=row.megatron + what.removeprefix("weight"),
                hf=tuple(name.removesuffix("weight") + what for name in row.hf),
                shapes=tuple((out, size // each) for out, size in row.shapes),
                segments=tuple(s // each for s in row.segments) if row.dim == 1 else row.segments,
                engine=row.engine.removesuffix("weight") + what,
                engines=tuple(name.removesuffix("weight") + what for name in row.engines),
                transposed=EXPERT in row.megatron,
            )
            for what, each in ((PACKED, PER_WORD), (SCALE, self.group))
        )
