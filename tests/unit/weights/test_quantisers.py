"""Quantisers against the arithmetic of transformers and compressed-tensors; SGLang's is in tests/contract."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.core.errors import CheckpointError
from slime.weights.quantised import formats
from slime.weights.quantised.formats import WHOLE, BlockFp8, ChannelFp8, GroupedInt4, QuantisedFormat
from tests.support.quantised import SHAPES, equal, random_weight


def format_of_blocks(**more: Any) -> BlockFp8:
    return BlockFp8(frozenset(), 128, 128, **more)


@pytest.mark.parametrize("shape", [s for s in SHAPES if not s[-1] % 128 and not s[-2] % 128])
def test_blocks_of_fp8_are_those_of_transformers_up_to_a_rounding(shape: tuple[int, ...]) -> None:
    """transformers multiplies by 448 / the largest entry and stores the reciprocal of that: each rounded once more."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    config = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=[128, 128], scale_fmt=None))
    weight, found = random_weight(shape, 1), format_of_blocks()
    codes, scales = found.quantise(weight)
    theirs = Fp8Quantize(config).convert({"a.weight": weight})
    large = theirs["a.weight_scale_inv"] > 1e-4 / 448
    assert (scales / theirs["a.weight_scale_inv"] - 1)[large].abs().max() < 2.0**-22
    ours, others = codes.double(), theirs["a.weight"].double()
    wide = scales.repeat_interleave(128, -2).repeat_interleave(128, -1).double()
    odd = (ours != others) & (wide > 1e-4 / 448)
    ties = (ours + others)[odd] / 2
    assert odd.float().mean() < 0.02
    assert ((weight.double() / wide)[odd] / ties - 1).abs().max() < 2.0**-21 if odd.any() else True, (
        "codes differ at ties"
    )
    back = Fp8Dequantize(config)._dequantize_one(codes, scales, torch.float32)
    assert equal(back, found.dequantise((codes, scales)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_groups_of_int4_are_those_of_compressed_tensors_bit_for_bit(group: int, dtype: torch.dtype) -> None:
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    found = GroupedInt4(frozenset(), group)
    for shape in ((8, group), (96, 4 * group), (1, 2 * group)):
        weight = random_weight(shape, group, dtype)
        groups = weight.unflatten(-1, (-1, group))
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        want = PackedQuantizationCompressor.compress(state, scheme)
        packed, scales = found.quantise(weight)
        assert equal(packed, want["weight_packed"]) and equal(scales, want["weight_scale"])
        back = PackedQuantizationCompressor.decompress(want, scheme)["weight"]
        assert equal(back, found.dequantise((packed, scales)).to(dtype))
        assert equal(back, found.fake(weight)) or dtype is torch.float32
        stack = torch.stack([weight, weight * 2])
        assert all(torch.equal(a[0], b) for a, b in zip(found.quantise(stack), (packed, scales), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_fp8_are_those_of_compressed_tensors_bit_for_bit(dtype: torch.dtype) -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="channel")
    for shape in ((8, 32), (130, 200), (256, 384)):
        weight = random_weight(shape, dtype=dtype)
        scale, zero = calculate_qparams(weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True), args)
        want = quantize(weight, scale, zero, args, dtype=torch.float8_e4m3fn)
        codes, scales = ChannelFp8(frozenset()).quantise(weight)
        assert equal(codes, want) and equal(scales, scale.float())
        back = ChannelFp8(frozenset()).dequantise((codes, scales)).to(dtype)
        assert equal(back, dequantize(want, scale, args=args))


FORMATS: dict[str, QuantisedFormat] = {
    "fp8": format_of_blocks(),
    "powers of two": format_of_blocks(powers_of_two=True),
    "channels": ChannelFp8(frozenset()),
    "int4": GroupedInt4(frozenset(), 32),
}


def test_weights_that_were_quantised_keep_their_codes_in_bfloat16() -> None:
    """A trainer that has changed nothing sends the codes that it read: bfloat16 moves scales by 2^-9, codes by none."""
    found = FORMATS["fp8"]
    codes, scales = found.quantise(random_weight((512, 384), dtype=torch.float32))
    again, moved = found.quantise(found.dequantise((codes, scales)).bfloat16())
    assert equal(codes, again) and (moved / scales - 1).abs().max() <= 2.0**-8


def test_with_powers_of_two_weights_that_were_quantised_stay_what_they_are() -> None:
    found = FORMATS["powers of two"]
    once = found.fake(random_weight((512, 384)))
    assert equal(once, found.fake(once))


@pytest.mark.parametrize("group", [32, 128])
def test_an_entry_of_int4_is_off_by_half_a_step(group: int) -> None:
    """Also the largest of a group, 7.5 steps from zero: codes end at -8 and at 7."""
    found, weight = GroupedInt4(frozenset(), group), random_weight((64, 512), dtype=torch.float32)
    packed, scales = found.quantise(weight)
    error = (found.dequantise((packed, scales)) - weight).abs()
    assert (error <= scales.repeat_interleave(group, -1) * 0.5 * (1 + 1e-5)).all()


@pytest.mark.parametrize("name", FORMATS)
def test_a_part_of_whole_blocks_is_quantised_as_within_the_whole(name: str) -> None:
    found, weight = FORMATS[name], random_weight((512, 512))
    whole = found.dequantise(found.quantise(weight))
    rows, columns = (length or 128 for length in found.block)
    parts = [(slice(rows, 2 * rows), slice(None)), (slice(None), slice(2 * columns, 4 * columns))]
    for part in parts[: 1 if found.block[1] == WHOLE else 2]:
        assert equal(found.dequantise(found.quantise(weight[part])), whole[part].contiguous())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(name: str, bad: float) -> None:
    weight = random_weight((256, 256))
    weight[200, 100] = bad
    with pytest.raises(CheckpointError, match="infinite or NaN"):
        FORMATS[name].quantise(weight)


def test_files_of_a_conversion_are_read_back_by_the_same_format() -> None:
    """`slime convert` rounds scales to 20 bits; they are read as any others."""
    weight = random_weight((256, 300), dtype=torch.float32)
    parts = formats.quantise(weight)
    assert equal(format_of_blocks().dequantise(parts), formats.dequantise(*parts, formats.BLOCK))
