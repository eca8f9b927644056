"""Blocks of FP8 as SGLang's own utilities make them, in a process of its own."""

from __future__ import annotations

from tests.support.ranks import Seat


def differing(_seat: Seat) -> list[str]:
    """What is not bit for bit SGLang's, of all shapes; and how many comparisons were made, first."""
    from slime.compat.sglang_cpu import activate

    activate("cpu")
    import torch
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant, per_block_cast_to_fp8
    from sglang.srt.layers.quantization.mxfp8_block_convert import bf16_to_block_fp8_128

    from slime.weights.quantised.formats import BlockFp8
    from tests.support.quantised import SHAPES, equal, random_weight

    wrong, number = [], 0
    for powers_of_two, theirs in ((False, bf16_to_block_fp8_128), (True, per_block_cast_to_fp8)):
        found = BlockFp8(frozenset(), 128, 128, powers_of_two=powers_of_two)
        for shape in SHAPES:
            for dtype in (torch.bfloat16, torch.float32):
                weight = random_weight(shape, dtype=dtype)
                codes, scales = found.quantise(weight)
                ours = zip(codes.reshape(-1, *shape[-2:]), scales.reshape(-1, *scales.shape[-2:]), strict=True)
                for own, matrix in zip(ours, weight.reshape(-1, *shape[-2:]), strict=True):
                    number += 1
                    if not all(equal(a, b) for a, b in zip(own, theirs(matrix), strict=True)):
                        wrong.append(f"{theirs.__name__} of {shape} {dtype}")
                back = block_quant_dequant(codes, scales, [128, 128], torch.bfloat16)
                if not equal(back, found.dequantise((codes, scales)).bfloat16()):
                    wrong.append(f"block_quant_dequant of {shape} {dtype}")
                if dtype is torch.bfloat16 and not equal(back, found.fake(weight)):
                    wrong.append(f"fake quantisation of {shape}")
    return [str(number), *wrong]
