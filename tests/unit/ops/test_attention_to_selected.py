"""Attention to selected keys is attention under a mask, without the mask: values, gradients, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from slime.ops import attention
from slime.ops.attention import to_selected
from tests.support.sparse_attention import choice, masked_attention
from tests.support.tensor_sizes import LargestTensor

NOPE, ROPE, VALUE, RANK = 5, 2, 3, 7
SCALE = 0.7


def arguments(n: int, m: int, k: int, heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Arguments of `to_selected`; the up projection is in float32 or wider."""
    generator = torch.Generator().manual_seed(n + m + k)
    shapes = (n, heads, NOPE + ROPE), (heads, NOPE + VALUE, RANK), (m, RANK + ROPE)
    query, up, latents = (torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return [query, up.to(torch.promote_types(dtype, torch.float32)), latents, choice(n, m, k)]


def value_and_gradients(form: Callable[..., Tensor], *given: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in given[:3]]
    out = form(*leaves, given[3], scale=SCALE)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.fixture(params=[1, 300, 1 << 25])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """One query at once, several, and all."""
    monkeypatch.setattr(attention, "ENTRIES_AT_ONCE", request.param)
    return int(request.param)


@pytest.mark.parametrize(("k", "heads"), [(1, 1), (4, 1), (4, 8), (23, 8)])
@pytest.mark.parametrize(("n", "ahead"), [(1, 0), (40, 0), (40, 23), (1, 63)])
def test_it_is_attention_under_a_mask(n: int, ahead: int, k: int, heads: int, at_once: int) -> None:
    given = arguments(n, n + ahead, min(k, n + ahead), heads)
    pairs = zip(value_and_gradients(to_selected, *given), value_and_gradients(masked_attention, *given), strict=True)
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_the_first_queries_share_their_keys_and_later_ones_gather_them() -> None:
    """Every query is in one block, and gathering begins where it moves less memory."""
    query, _, latents, selected = arguments(63, 80, 4, heads=1)
    blocks = list(attention._blocks(query, latents, selected))
    assert [n for b in blocks for n in range(b.rows.start, b.rows.stop)] == list(range(63))
    assert [(b.rows.start, b.num_keys, b.gathers) for b in blocks] == [(0, 80, True)]
    query, _, latents, selected = arguments(80, 80, 4, heads=2)
    blocks = list(attention._blocks(query, latents, selected))
    turn = 4 + 4 * (RANK + ROPE) // (4 * 2)
    assert [(b.rows.start, b.num_keys, b.gathers) for b in blocks] == [(0, turn, False), (turn, 80, True)]


def test_a_key_that_is_not_selected_changes_nothing() -> None:
    query, up, latents, selected = arguments(40, 40, 6, heads=2)
    want = to_selected(query, up, latents, selected, scale=SCALE)
    for key in (0, 17):
        changed = latents.clone()
        changed[key] += 1.0
        rows = (to_selected(query, up, changed, selected, scale=SCALE) != want).flatten(1).any(1)
        sees = ((selected == key) & (torch.arange(40).unsqueeze(1) >= key)).any(1)
        assert torch.equal(rows, sees)


@pytest.mark.parametrize("k", [4, 23])
def test_in_bfloat16_it_is_as_exact_as_the_formula(k: int) -> None:
    given = arguments(60, 80, k, heads=4, dtype=torch.bfloat16)
    exact = value_and_gradients(masked_attention, *(x.double() if x.is_floating_point() else x for x in given))
    plain = [given[0], given[1].bfloat16(), *given[2:]]
    for got, formula, want in zip(
        value_and_gradients(to_selected, *given), value_and_gradients(masked_attention, *plain), exact, strict=True
    ):
        assert got.dtype == (torch.float32 if got.shape == given[1].shape else torch.bfloat16)
        far, allowed = ((x.double() - want).norm() / want.norm() for x in (got, formula))
        assert far < 1.2 * allowed, f"{far:.1e}, the formula in bfloat16 {allowed:.1e}"


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_it_runs_with_deterministic_algorithms(deterministic: None) -> None:
    given = arguments(40, 60, 4, heads=2, dtype=torch.float32)
    first, second = (value_and_gradients(to_selected, *given) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("heads", [1, 8])
def test_no_tensor_has_an_element_per_pair_of_tokens(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    n, k, limit = 1024, 64, 1 << 16
    monkeypatch.setattr(attention, "ENTRIES_AT_ONCE", limit)
    given = arguments(n, n, k, heads, dtype=torch.float32)
    with LargestTensor() as largest:
        value_and_gradients(to_selected, *given)
    assert largest.num_elements <= 2 * limit < n * n // 7, largest.made_by
    with LargestTensor() as largest:
        masked_attention(*given, scale=SCALE)
    assert largest.num_elements >= n * n
