"""FP8 products: weights have the codes of engines, a token does not feel the others, small gradients survive."""

from __future__ import annotations

import pytest
import torch

from slime.ops import linear
from slime.weights.quantised.formats import BlockFp8

SHAPES = [(128, 128), (256, 384), (300, 200), (5, 7)]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.mark.parametrize("shape", SHAPES)
def test_codes_and_scales_of_a_weight_are_those_that_engines_get(shape: tuple[int, int]) -> None:
    weight = draw(*shape)
    codes, scales = BlockFp8(frozenset(), linear.GROUP, linear.GROUP).quantise(weight)
    own_codes, own_scales = linear.by_blocks(weight)
    assert torch.equal(own_scales, scales)
    assert torch.equal(own_codes.float(), codes.float())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_is_that_of_the_quantised_factors(shape: tuple[int, int], transposed: bool) -> None:
    """Oracle: float64, with scales by loops over groups. The error of FP8 itself is a few percent."""
    weight = draw(*shape, seed=1).float()
    x = draw(9, shape[0 if transposed else 1], seed=2).float()
    rounded = torch.zeros_like(x, dtype=torch.float64)
    for part, own in zip(x.split(128, dim=1), rounded.split(128, dim=1), strict=True):
        scale = part.abs().amax(1, keepdim=True) / 448
        own.copy_((part / scale).to(torch.float8_e4m3fn).double() * scale.double())
    blocks = torch.zeros_like(weight, dtype=torch.float64)
    for rows, own_rows in zip(weight.split(128), blocks.split(128), strict=True):
        for part, own in zip(rows.split(128, dim=1), own_rows.split(128, dim=1), strict=True):
            scale = part.abs().max() / 448
            own.copy_((part / scale).to(torch.float8_e4m3fn).double() * scale.double())
    want = rounded @ (blocks if transposed else blocks.t())
    got = linear.fp8_product(x, weight, transposed=transposed).double()
    plain = x.double() @ (weight.double() if transposed else weight.double().t())
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    assert 1e-3 < (got - plain).norm() / plain.norm() < 0.08


def test_a_row_does_not_feel_the_others() -> None:
    weight, x = draw(256, 256), draw(64, 256, seed=3)
    alone = torch.cat([linear.by_rows(row[None])[0].float() for row in x])
    assert torch.equal(linear.by_rows(x)[0].float(), alone)
    x[5] *= 1e4
    again = linear.fp8_product(x, weight)
    assert torch.equal(again[6:], linear.fp8_product(draw(64, 256, seed=3), weight)[6:])


@pytest.mark.parametrize("size", [1e-3, 1e-12, 1e-24])
def test_gradients_of_any_size_keep_their_digits(size: float) -> None:
    grad, weight = draw(16, 256, seed=4).float(), draw(256, 128, seed=5)
    want = linear.fp8_product(grad, weight, transposed=True)
    got = linear.fp8_product(grad * size, weight, transposed=True) / size
    assert (got - want).norm() < 1e-2 * want.norm()


def test_rows_of_zeros_and_no_rows_at_all() -> None:
    weight = draw(128, 256)
    assert not linear.fp8_product(torch.zeros(3, 256), weight).any()
    assert linear.fp8_product(torch.zeros(0, 256), weight).shape == (0, 128)
