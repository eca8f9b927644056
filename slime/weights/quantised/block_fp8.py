"""FP8 with a scale for each block, as DeepSeek-V3's and Qwen3's public files have it, in the engine's arithmetic.

`<name>` in e4m3 beside `<name>_scale_inv` in float32: the block's largest entry / 448, and the quotients rounded to the
nearest code. That is DeepSeek's recipe (arXiv:2412.19437, section 3.3.2) and, bit for bit, SGLang's
`bf16_to_block_fp8_128`, whose smallest block (largest entry 1e-4) this keeps. With `scale_fmt: ue8m0` in config.json
(DeepSeek-V3.1) scales are powers of two, rounded up: SGLang's `per_block_cast_to_fp8`.

`slime convert --to fp8` writes other scales (`weights.fp8`): rounded to 20 bits, so that what it wrote quantises to the
same bits again. A weight sync has no such way back to keep: the trainer's weights have passed bfloat16 anyhow, in which
the largest entry of a block moves by up to 2^-9, and its scale with it. The codes of weights that were dequantised stay
the same: half a step of e4m3 is at least eight times as much.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.core.errors import ConfigError
from slime.models.common.table import Row
from slime.weights.quantised.format import QuantisedFormat, require_finite

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SMALLEST = 1e-4
"""A block counts as having an entry this large, so that no scale is zero."""
E4M3_MAX = 448.0
"""Largest finite value of float8_e4m3fn."""
SCALE_SUFFIX = "_scale_inv"
"""What the name of a scale adds to that of its weight, in files and in engines."""


@dataclass(frozen=True)
class BlockFp8(QuantisedFormat):
    """e4m3 codes and float32 scales of blocks."""

    block_rows: int
    block_columns: int
    powers_of_two: bool = False
    """Scales are powers of two."""

    @property
    def title(self) -> str:
        return f"FP8 in blocks of {self.block_rows} x {self.block_columns}"

    @property
    def block(self) -> tuple[int, int]:
        return self.block_rows, self.block_columns

    def parts_of(self, hf_name: str) -> tuple[str, ...]:
        return hf_name, hf_name + SCALE_SUFFIX

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        import torch

        return torch.float8_e4m3fn, torch.float32

    def quantise(self, weights: Tensor) -> tuple[Tensor, ...]:
        import torch

        rows, columns = self.block
        *lead, out, size = weights.shape
        more = -out % rows, -size % columns
        padded = torch.nn.functional.pad(weights, (0, more[1], 0, more[0])) if any(more) else weights
        blocks = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
        scales = blocks.abs().amax((-3, -1)).float().clamp(min=SMALLEST) / E4M3_MAX
        require_finite(scales, weights, "FP8")
        if self.powers_of_two:
            scales = power_of_two_above(scales)
        codes = (blocks.float() / scales[..., :, None, :, None]).to(torch.float8_e4m3fn)
        codes = codes.reshape(*lead, out + more[0], size + more[1])
        return (codes[..., :out, :size].contiguous() if any(more) else codes), scales

    def dequantise(self, parts: Sequence[Tensor]) -> Tensor:
        from slime.weights.fp8 import dequantise

        codes, scales = parts
        return dequantise(codes, scales, self.block)

    def rows(self, row: Row) -> tuple[Row, ...]:
        self.require_linear(row)
        block = self.block
        if row.dim is not None and len(row.segments) > 1 and any(size % block[row.dim] for size in row.segments):
            raise ConfigError(
                f"got {' and '.join(row.hf)}, which engines stack, of {list(row.segments)} rows in {self.title}: a "
                "scale would belong to two of them; choose a checkpoint whose sizes are multiples of a block"
            )
        dim = row.dim
        scales = dataclasses.replace(
            row,
            megatron=row.megatron + SCALE_SUFFIX,
            hf=tuple(name + SCALE_SUFFIX for name in row.hf),
            shapes=tuple((-(-out // block[0]), -(-size // block[1])) for out, size in row.shapes),
            segments=() if dim is None else tuple(-(-size // block[dim]) for size in row.segments),
            engine=row.engine + SCALE_SUFFIX,
            engines=tuple(name + SCALE_SUFFIX for name in row.engines),
            wide=True,
        )
        return row, scales


def power_of_two_above(scales: Tensor) -> Tensor:
    """The smallest powers of two that are not below these positive numbers."""
    import torch

    bits = scales.view(torch.int32)
    exponents = (bits >> 23) + (bits & 0x7FFFFF != 0).to(torch.int32)
    return (exponents.clamp(1, 254) << 23).view(torch.float32)
