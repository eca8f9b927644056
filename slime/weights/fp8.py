"""Block-scaled FP8 of Hugging Face checkpoints: `<name>` in float8_e4m3fn beside `<name>_scale_inv` in float32.

The format is that of DeepSeek-V3's public files (arXiv:2412.19437, section 3.3.2): a weight is codes times the scale
of its block of `weight_block_size` entries; the last block of a dimension may be smaller.

Invariants
1. `quantise(dequantise(q, s))` is bitwise `(q, s)` for what `quantise` wrote: scales have 20 significant bits, codes at
   most 4, so that their product is exact in float32. Foreign scales use all 24 bits and may move by 2^-19; the codes
   do not if the largest of each block is the largest code, as in public files.
2. A block's error is at most max(|w| / 16, scale / 1024): half a step of e4m3, normal or subnormal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from slime.core.errors import CheckpointError, ConfigError
from slime.weights.quantised.block_fp8 import E4M3_MAX

BLOCK = (128, 128)
"""Block size [rows, columns] that is written; a file that is read says its own."""
_SMALLEST = 2.0**-90
"""A block without a larger entry is written as zeros: its scale would leave float32's normal range."""
_DROPPED_BITS = 0b1111
"""The four bits of a float32 mantissa that a scale leaves empty."""
_LINEAR = re.compile(
    r"(?:^|.*\.)layers\.\d+\.(?:self_attn\.(?:[qkvo]_proj|q_[ab]_proj|kv_a_proj_with_mqa|kv_b_proj|indexer\.(?:wq_b|wk))"
    r"|linear_attn\.(?:in_proj_(?:qkvz|qkv|z)|out_proj)"
    r"|mlp\.(?:experts\.\d+\.|shared_experts?\.)?(?:gate|up|down|gate_up)_proj"
    r"|block_sparse_moe\.experts\.\d+\.w[123])\.weight"
)
_STACKED = re.compile(r"(.*\.experts\.)(gate_up|down)_proj")


def block_of(quantisation: Mapping[str, Any]) -> tuple[int, int]:
    """Block size [rows, columns] of the `quantization_config` of an FP8 checkpoint.

    Raises `ConfigError` for FP8 of another kind.
    """
    block = quantisation.get("weight_block_size")
    if not block or len(block) != 2 or min(block) < 1:
        raise ConfigError(
            f"got a checkpoint with quant_method='fp8', weight_block_size={block}; slime reads FP8 with block scales "
            "(two block sizes); choose such a checkpoint or one in bfloat16"
        )
    return int(block[0]), int(block[1])


def quantises(hf_name: str) -> bool:
    """Whether `--to fp8` quantises a tensor: linear weights of attention, MLP and experts, as in the public files.

    Embeddings, norms, routers, gates, convolutions and the output layer stay as they are.
    """
    return _LINEAR.fullmatch(hf_name) is not None


def apart(hf_name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Experts that are stacked in one tensor, [gate; up] of each, one by one as FP8 files have them; others as is."""
    stacked = _STACKED.fullmatch(hf_name)
    if stacked is None:
        yield hf_name, tensor
        return
    parts = stacked[2].split("_")
    for i, expert in enumerate(tensor):
        for part, weight in zip(parts, expert.chunk(len(parts)), strict=True):
            yield f"{stacked[1]}{i}.{part}_proj.weight", weight


def quantise(weight: Tensor, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor]:
    """Codes [..., out, in] in float8_e4m3fn and scales [..., ceil(out / rows), ceil(in / columns)] in float32.

    A scale is the block's largest entry / 448, rounded up to 20 bits; 1 for a block of zeros. Works on one row of
    blocks at a time. Raises `CheckpointError` for a weight that is not finite.
    """
    codes, scales = [], []
    for rows in weight.float().split(block[0], -2):
        largest = rows.abs().amax(-2)
        largest = torch.nn.functional.pad(largest, (0, -largest.shape[-1] % block[1]))
        largest = largest.unflatten(-1, (-1, block[1])).amax(-1)
        scale = torch.where(largest <= _SMALLEST, 1.0, _round_up(largest / E4M3_MAX))  # NaN goes on to the check
        codes.append((rows / _widen(scale, block[1], rows.shape[-1])).to(torch.float8_e4m3fn))
        scales.append(scale)
    stacked = torch.stack(scales, -2)
    if not stacked.isfinite().all():
        raise CheckpointError(f"got a weight {list(weight.shape)} with an infinite or undefined entry; FP8 has neither")
    return torch.cat(codes, -2), stacked


def dequantise(codes: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """The weight [..., out, in] in float32. `scale`: [..., ceil(out / rows), ceil(in / columns)]; read only.

    Raises `CheckpointError` if the shapes do not belong together.
    """
    *lead, out, columns = codes.shape
    want = [*lead, -(-out // block[0]), -(-columns // block[1])]
    if list(scale.shape) != want:
        raise CheckpointError(
            f"got scales {list(scale.shape)} of a weight {list(codes.shape)} in blocks of {list(block)}, which need "
            f"{want}; weight_block_size in config.json does not belong to these files"
        )
    weight = codes.float()
    for i, rows in enumerate(weight.split(block[0], -2)):
        rows *= _widen(scale[..., i, :].float(), block[1], columns)
    return weight


def config_entry(kept: list[str]) -> dict[str, Any]:
    """`quantization_config` of the files that are written; `kept`: modules whose matrices are not quantised."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
        "modules_to_not_convert": kept,
    }


def _widen(scale: Tensor, block_columns: int, columns: int) -> Tensor:
    """One row of block scales [..., blocks] -> [..., 1, columns]."""
    return scale.repeat_interleave(block_columns, -1)[..., :columns].unsqueeze(-2)


def _round_up(scale: Tensor) -> Tensor:
    """Positive float32, rounded up to 20 significant bits."""
    bits = scale.contiguous().view(torch.int32)
    return ((bits + _DROPPED_BITS) & ~_DROPPED_BITS).view(torch.float32)
