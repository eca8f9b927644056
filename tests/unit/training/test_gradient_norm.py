"""The norm and the clip of all gradients at once are Megatron's, which takes them one by one."""

from __future__ import annotations

import pytest
import torch

from slime.compat import megatron_gradients as patch

SIZES = (1, 7, 0, 300, 1 << 12)


def _gradients(seed: int = 0) -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=draws) * 10.0 ** (i - 2) for i, size in enumerate(SIZES)]


def test_the_norm_is_that_of_one_long_vector() -> None:
    grads = _gradients()
    norm, _ = patch.l2_norm(0, None, [grads], False)
    assert norm.shape == (1,) and norm.dtype == torch.float32
    assert float(norm) == pytest.approx(float(torch.cat(grads).double().norm()), rel=1e-6)


def test_a_rank_without_gradients_has_norm_zero() -> None:
    for grads in ([], [torch.empty(0)]):
        assert float(patch.l2_norm(0, None, [grads], False)[0]) == 0.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_number_that_is_not_finite_is_seen(value: float) -> None:
    grads = _gradients()
    grads[3][17] = value
    assert not torch.isfinite(patch.l2_norm(0, None, [grads], False)[0]).any()


def test_scaling_works_in_place_and_from_one_list_to_another() -> None:
    grads, source = _gradients(1), _gradients(1)
    patch.scale(0, None, [grads, grads], 0.25)
    target = [torch.zeros_like(x) for x in source]
    patch.scale(0, None, [source, target], 0.25)
    for a, b, whole in zip(grads, target, _gradients(1), strict=True):
        assert torch.equal(a, whole * 0.25) and torch.equal(b, a)
    patch.scale(0, None, [[], []], 0.25)


def test_a_cpu_keeps_megatrons_own_and_a_gpu_gets_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.optimizer import clip_grads

    for name in ("l2_norm_impl", "multi_tensor_scale_impl"):
        monkeypatch.setattr(clip_grads, name, vars(clip_grads)[name])  # given back afterwards
    before = clip_grads.l2_norm_impl
    assert patch.activate_norm("cpu") == [] and clip_grads.l2_norm_impl is before
    assert [r.took_effect for r in patch.activate_norm("cuda")] == [True]
    assert clip_grads.l2_norm_impl is patch.l2_norm and clip_grads.multi_tensor_scale_impl is patch.scale
    assert [r.took_effect for r in patch.activate_norm("cuda")] == [True], "again: the same"
