"""The AdamW that holds its own state: torch's arithmetic, wherever and however precisely the state is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.training.step import adamw
from slime.training.step.adamw import EXP_AVG, EXP_AVG_SQ, MASTER, HeldAdamW, Holding, round_at_random

HALF = Holding(torch.float16, torch.bfloat16, torch.bfloat16)
SIZES = (33, 5, 70)


def _groups(parameters: list[Tensor], rate: float = 1e-2) -> list[dict[str, Any]]:
    common = {"lr": rate, "betas": (0.9, 0.95), "eps": 1e-8}
    return [
        {"params": parameters[:1], "weight_decay": 0.1, **common},
        {"params": [], "weight_decay": 0.5, **common},
        {"params": parameters[1:], "weight_decay": 0.0, **common},
    ]


def _weights(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draws = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=draws).to(dtype) for size in SIZES]


def _steps(optimizer: HeldAdamW, count: int, first: int = 0) -> list[Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(first, first + count):
        draws = torch.Generator().manual_seed(100 + step)
        for p in parameters:
            p.decoupled_grad = torch.randn(p.numel(), generator=draws)  # type: ignore[attr-defined]
        optimizer.step()
    return parameters


def _torch_steps(parameters: list[Tensor], count: int) -> list[Tensor]:
    optimizer = torch.optim.AdamW([g for g in _groups(parameters) if g["params"]], fused=True)
    for step in range(count):
        draws = torch.Generator().manual_seed(100 + step)
        for p in parameters:
            p.grad = torch.randn(p.numel(), generator=draws)
        optimizer.step()
    return parameters


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("block", [16, adamw.BLOCK])
def test_in_float32_every_bit_is_that_of_torch(fraction: float, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "BLOCK", block)
    got = _steps(HeldAdamW(_groups(_weights()), Holding(host_fraction=fraction)), 5)
    want = _torch_steps(_weights(), 5)
    limit = 0.0 if block > max(SIZES) else 1e-6  # a vector unit may round the ends of blocks in another way
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=limit, atol=limit)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_weights_in_half_precision_are_those_of_float32_rounded_once(fraction: float) -> None:
    optimizer = HeldAdamW(_groups(_weights(torch.bfloat16)), Holding(host_fraction=fraction))
    got = _steps(optimizer, 5)
    want = _torch_steps([w.to(torch.bfloat16).float() for w in _weights()], 5)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b.to(torch.bfloat16)) and torch.equal(optimizer.state[a][MASTER], b)


def test_the_host_holds_the_part_that_was_asked_for() -> None:
    numel = sum(SIZES)
    for fraction, places in ((0.0, set()), (SIZES[0] / numel, {0}), (0.34, {0, 1}), (1.0, {0, 1, 2})):
        assert HeldAdamW(_groups(_weights()), Holding(host_fraction=fraction))._on_host == places


def test_state_in_half_precision_has_half_the_bytes_and_learns_as_well() -> None:
    optimizer = HeldAdamW(_groups(_weights(torch.bfloat16)), HALF)
    got = _steps(optimizer, 40)
    want = _torch_steps([w.to(torch.bfloat16).float() for w in _weights()], 40)
    for a, b in zip(got, want, strict=True):
        held = optimizer.state[a]
        assert (held[MASTER].dtype, held[EXP_AVG].dtype, held[EXP_AVG_SQ].dtype) == (
            torch.float16,
            torch.bfloat16,
            torch.bfloat16,
        )
        moved = float((b - b.mean()).norm())
        assert float((a.float() - b).norm()) < 0.02 * moved


def test_updates_that_are_smaller_than_a_digit_arrive_on_average() -> None:
    """Rounded to nearest a float16 weight of 0.5 would never feel an update of 1e-6."""
    weight = torch.full((20_000,), 0.5, dtype=torch.bfloat16)
    groups = [{"params": [weight], "weight_decay": 0.0, "lr": 1e-6, "betas": (0.9, 0.95), "eps": 1e-8}]
    optimizer = HeldAdamW(groups, HALF)
    for _ in range(50):
        weight.decoupled_grad = torch.ones(weight.numel())  # type: ignore[attr-defined]
        optimizer.step()
    moved = 0.5 - optimizer.state[weight][MASTER].double()
    assert float(moved.mean()) == pytest.approx(50e-6, rel=0.1) and float(moved.max()) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_at_random_takes_a_neighbour_and_is_right_on_average(dtype: torch.dtype) -> None:
    draws = torch.Generator().manual_seed(0)
    x = torch.tensor([1.0, -1.0, 0.1, -0.1, 3e-3, 700.3, 0.0])
    many = torch.stack([round_at_random(x, dtype, draws) for _ in range(4000)]).double()
    eps = torch.finfo(dtype).eps
    assert bool(((many - x.double()).abs() <= eps * x.double().abs()).all()), "a neighbour"
    assert torch.equal(many[:, :2], torch.tensor([1.0, -1.0]).double().expand(4000, 2)), "what fits stays"
    limit = 6 * 0.5 * eps / 4000**0.5  # six standard deviations
    assert bool(((many.mean(0) - x.double()).abs() <= limit * x.double().abs()).all())


@pytest.mark.parametrize("holding", [HALF, Holding(host_fraction=0.5), Holding(torch.float16, host_fraction=1.0)])
def test_resume_equals_not_stopping(holding: Holding) -> None:
    whole = HeldAdamW(_groups(_weights(torch.bfloat16)), holding)
    middle = [p.clone() for p in _steps(whole, 3)]
    kept = [{key: value.clone() for key, value in whole.state[p].items()} for p in whole._parameters()]
    want = _steps(whole, 3, first=3)

    resumed = HeldAdamW(_groups(middle), holding)
    for p, held in zip(resumed._parameters(), kept, strict=True):
        resumed.state[p] = held
    for group in resumed.param_groups:
        group["step"] = 3
    resumed.adopt()
    assert all(torch.equal(a, b) for a, b in zip(_steps(resumed, 3, first=3), want, strict=True))


def test_new_weights_are_where_the_next_step_starts_from() -> None:
    optimizer = HeldAdamW(_groups(_weights(torch.bfloat16)), Holding(host_fraction=1.0))
    for p in optimizer._parameters():
        p.fill_(2.0)
    optimizer.renew_masters()
    assert all(bool((optimizer.state[p][MASTER] == 2.0).all()) for p in optimizer._parameters())


def test_a_parameter_without_a_gradient_stays() -> None:
    optimizer = HeldAdamW(_groups(_weights()), Holding())
    optimizer.zero_grad()
    before = [p.clone() for p in optimizer._parameters()]
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(optimizer._parameters(), before, strict=True))


def test_settings_say_how_state_is_held() -> None:
    plain = {"optimizer_cpu_offload": False, "use_precision_aware_optimizer": False, "optimizer_offload_fraction": 0.7}
    dtypes = {"main_params_dtype": "float16", "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "float32"}
    assert Holding.of({**plain, **dtypes}) is None
    assert Holding.of({**plain, **dtypes, "optimizer_cpu_offload": True}) == Holding(host_fraction=0.7)
    both = Holding.of({**plain, **dtypes, "optimizer_cpu_offload": True, "use_precision_aware_optimizer": True})
    assert both == Holding(torch.float16, torch.bfloat16, torch.float32, 0.7)


@pytest.mark.parametrize(("holding", "itemsize"), [(Holding(), 4), (HALF, 2)])
def test_the_first_step_makes_on_the_device_what_was_said(holding: Holding, itemsize: int) -> None:
    optimizer = HeldAdamW(_groups(_weights()), holding)
    assert optimizer.first_step_bytes() == 2 * itemsize * sum(SIZES)
    before = _num_state_bytes(optimizer)
    _steps(optimizer, 1)
    assert _num_state_bytes(optimizer) - before == 2 * itemsize * sum(SIZES)
    assert optimizer.first_step_bytes() == 0
    on_host = HeldAdamW(_groups(_weights()), replace(holding, host_fraction=1.0))
    assert on_host.first_step_bytes() == 0, "what is kept on the host takes nothing of the device"


def _num_state_bytes(optimizer: HeldAdamW) -> int:
    return sum(v.nbytes for state in optimizer.state.values() for v in state.values() if v.ndim)
