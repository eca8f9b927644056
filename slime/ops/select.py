"""Chooses the implementation of each op once, when a trainer starts. `slime doctor` prints the choices.

`--kernels auto` uses the fused form of an op if it can run, "reference" never uses it, and "fused" raises an error if
an op has no fused form that can run. "flash4" is "auto" with FlashAttention 4, or an error if that cannot run. Each
choice includes its reasons, so no fallback is silent.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime.core.errors import ConfigError
from slime.ops.attention import flash4_problems, flash_problems, varlen_problems
from slime.ops.invariant import fix_products

Problems = Callable[[torch.device, torch.dtype], tuple[str, ...]]
"""Returns the reasons why an implementation cannot run on a device with a training dtype; empty if it can."""
REFERENCE, FUSED = "reference", "fused"
INVARIANT = "invariant"


@dataclass(frozen=True, slots=True)
class Choice:
    op: str
    name: str
    """"reference", or the name of a fused form."""
    why: str
    """Why this implementation was chosen, or why the fused form cannot run."""

    def __str__(self) -> str:
        return f"{self.op} {self.name} ({self.why})"


@dataclass(frozen=True, slots=True)
class Fused:
    name: str
    what: str
    """A description of the implementation."""
    problems: Problems


def triton_problems(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    reasons = (
        ("its kernels need a GPU", device.type != "cuda"),
        ("triton is not installed", importlib.util.find_spec("triton") is None),
        (f"its kernels do not support {dtype}", dtype == torch.float64),
    )
    return tuple(reason for reason, holds in reasons if holds)


def expert_problems(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    from slime.ops.experts import grouped_problems

    return triton_problems(device, dtype) or grouped_problems(device, dtype)


def delta_problems(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    reasons = triton_problems(device, dtype)
    if reasons or not torch.cuda.is_available():
        return reasons
    properties: Any = torch.cuda.get_device_properties(device)
    shared = int(properties.shared_memory_per_block_optin)
    return () if shared >= DELTA_SHARED else (f"its kernels need {DELTA_SHARED} bytes of shared memory, not {shared}",)


DELTA_SHARED = 160 * 1024
"""Required shared memory per block in bytes; data center GPUs have it. The kernels use up to 145 KiB, in float32."""
OPS: Mapping[str, tuple[Fused, ...]] = {
    "norm": (Fused(FUSED, "one Triton kernel forward, one backward", triton_problems),),
    "qk_rotary": (Fused(FUSED, "one Triton kernel splits, normalises and rotates queries and keys", triton_problems),),
    "swiglu": (Fused(FUSED, "one Triton kernel forward, one backward", triton_problems),),
    "attention": (
        Fused(FUSED, "aten::_flash_attention_forward, KV heads not repeated", flash_problems),
        Fused("varlen", "torch.nn.attention.varlen", varlen_problems),
    ),
    "repeats": (Fused(FUSED, "one Triton kernel sums the gradients of copied rows", triton_problems),),
    "delta_rule": (Fused(FUSED, "Triton kernels over chunks of tokens", delta_problems),),
    "experts": (Fused(FUSED, "PyTorch's grouped matmul, Triton kernels for rows", expert_problems),),
}
"""Op -> its fused forms, best first."""


def fp8_problems(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    from slime.ops import linear

    return linear.fp8_problems(device, dtype)


FLASH4 = "flash4"
FLASH4_FORMS = (Fused(FLASH4, "FlashAttention 4, KV heads not repeated", flash4_problems),)
"""The form of attention that `--kernels flash4` requires."""
FP8, DEEP_GEMM = "fp8", "deep_gemm"
FP8_FORMS = (Fused(DEEP_GEMM, "Triton kernels quantise, DeepGEMM multiplies", fp8_problems),)
"""The forms of `slime.ops.linear`, which is chosen only for `--fp8-format`."""

_chosen: dict[str, Choice] = {}
"""This process's choices. An op without an entry uses the reference."""


def choose(device: torch.device, dtype: torch.dtype, kernels: str = "auto") -> tuple[Choice, ...]:
    """Chooses the implementation of every op on `device` for the training dtype. `kernels` is the value of `--kernels`.

    Raises `ConfigError` if `kernels` is "fused" and an op has no fused form that can run, or if it is "flash4" and
    FlashAttention 4 cannot run.
    """
    assert kernels in ("auto", REFERENCE, FUSED, FLASH4), f"--kernels {kernels}"
    forms: Mapping[str, tuple[Fused, ...]] = {**OPS, "attention": FLASH4_FORMS} if kernels == FLASH4 else OPS
    return tuple(_choose(op, own, device, dtype, kernels) for op, own in forms.items())


def _choose(op: str, forms: tuple[Fused, ...], device: torch.device, dtype: torch.dtype, kernels: str) -> Choice:
    if kernels == REFERENCE:
        return Choice(op, REFERENCE, "--kernels reference")
    against: list[str] = []
    for form in forms:
        reasons = form.problems(device, dtype)
        if not reasons:
            return Choice(op, form.name, "; ".join((form.what, *against)))
        against.append(f"not {form.what}: {' and '.join(reasons)}" if len(forms) > 1 else " and ".join(reasons))
    if kernels == FUSED or forms is FLASH4_FORMS:
        raise ConfigError(f"--kernels {kernels} is not available for {op}: {'; '.join(against)}; use --kernels auto")
    return Choice(op, REFERENCE, "; ".join(against))


def use(
    device: torch.device, dtype: torch.dtype, kernels: str = "auto", *, invariant: bool = False, fp8: bool = False
) -> tuple[Choice, ...]:
    """Calls `choose`, with the same errors, and applies the choices to this process.

    `invariant`: results for a token must not depend on the rest of the batch (`slime.ops.invariant`). `fp8`: linear
    layers multiply in FP8 (`slime.ops.linear`); raises `ConfigError` if a GPU has no kernels for it, because the
    reference would be slower than training without FP8.
    """
    choices = choose(device, dtype, kernels)
    if fp8:
        choice = _choose(FP8, FP8_FORMS, device, dtype, kernels)
        if choice.name == REFERENCE and device.type != "cpu" and kernels != REFERENCE:
            raise ConfigError(f"--fp8-format does not work here: {choice.why}; drop the flag")
        choices = (*choices, choice)
    if invariant:
        fix_products(device)
        same = Choice("attention", INVARIANT, "--true-on-policy: same summation order in trainer and engines")
        choices = tuple(same if choice.op == same.op else choice for choice in choices)
    _chosen.clear()
    _chosen.update((choice.op, choice) for choice in choices)
    return choices


def is_invariant() -> bool:
    """Whether this process uses `slime.ops.invariant`."""
    return "attention" in _chosen and _chosen["attention"].name == INVARIANT


def name_of(op: str, x: Tensor) -> str:
    """Returns the implementation of `op` for the tensor: the chosen one on a GPU, the reference on a CPU."""
    choice = _chosen.get(op) if x.is_cuda else None
    return REFERENCE if choice is None else choice.name


@functools.lru_cache(maxsize=8)
def num_processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
