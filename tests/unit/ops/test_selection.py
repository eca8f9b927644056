"""What each op is computed by: known for every device, with the reason, and never another than was asked for."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from slime.core.errors import ConfigError
from slime.ops import attention, select
from slime.ops.select import FUSED, OPS, REFERENCE, choose

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def nothing_chosen() -> Iterator[None]:
    before = dict(select._chosen)
    yield
    select._chosen.clear()
    select._chosen.update(before)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_cpu_has_the_reference_of_every_op(kernels: str) -> None:
    choices = select.use(CPU, torch.float32, kernels)
    assert [c.op for c in choices] == list(OPS) and {c.name for c in choices} == {REFERENCE}
    assert all(c.why for c in choices), "a choice says why"
    assert {select.name_of(op, torch.zeros(1)) for op in OPS} == {REFERENCE}


def test_fused_is_refused_where_it_cannot_run() -> None:
    with pytest.raises(ConfigError, match="is not available for norm: its kernels need a GPU; use --kernels auto"):
        choose(CPU, torch.bfloat16, "fused")
    with pytest.raises(ConfigError):
        select.use(CPU, torch.bfloat16, "fused")


def test_flash4_and_fp8_are_refused_where_they_cannot_run() -> None:
    with pytest.raises(ConfigError, match="--kernels flash4 is not available for attention: its kernels need a GPU"):
        choose(CPU, torch.bfloat16, "flash4")
    with pytest.raises(ConfigError, match="--fp8-format does not work here: its kernels support bfloat16"):
        select.use(GPU, torch.float32, fp8=True)
    *_, choice = select.use(CPU, torch.bfloat16, fp8=True)
    assert (choice.op, choice.name) == ("fp8", REFERENCE)
    assert "fp8" not in {choice.op for choice in select.use(CPU, torch.bfloat16)}


def test_reference_is_what_is_asked_for_on_a_gpu_too() -> None:
    assert {(c.name, c.why) for c in choose(GPU, torch.bfloat16, "reference")} == {(REFERENCE, "--kernels reference")}


def test_the_choice_follows_dtype_and_what_is_installed() -> None:
    found = {c.op: c for c in choose(GPU, torch.bfloat16)}
    assert found["attention"].name == FUSED, "this torch has the operator"
    assert {c.op: c.name for c in choose(GPU, torch.float32)}["attention"] == REFERENCE
    has_triton = importlib.util.find_spec("triton") is not None
    assert found["norm"].name == (FUSED if has_triton else REFERENCE)
    assert has_triton or found["norm"].why == "triton is not installed"


def test_a_fallback_says_what_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: an operator with other arguments is found out when implementations are chosen, and the reason is shown."""
    monkeypatch.setattr(attention, "FLASH_ARGUMENTS", ("another", "order"))
    choice = {c.op: c for c in choose(GPU, torch.bfloat16)}["attention"]
    assert choice.name == "varlen" and "not aten::_flash_attention_forward" in choice.why
    assert "has different arguments" in str(choice)


def test_a_tensor_on_a_cpu_is_computed_there() -> None:
    select.use(GPU, torch.bfloat16)
    assert {select.name_of(op, torch.zeros(1)) for op in OPS} == {REFERENCE}


def test_kernels_are_not_imported_with_the_ops() -> None:
    code = (
        "import sys\n"
        "import slime.ops.norm, slime.ops.qk_rotary, slime.ops.swiglu, slime.ops.attention\n"
        "assert not [m for m in sys.modules if m.startswith('slime.ops.kernels')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
