"""Makes MoE layers of stock megatron-core work without Transformer Engine, on CPUs and GPUs (`activate()`).

Invariants
1. Every patch verifies that it took effect and raises `EngineError` if it did not.
2. Only module-level names in modules under `megatron.core.transformer.moe` are changed.
"""

from __future__ import annotations

import importlib
from typing import Any

from slime.compat import PatchReport, megatron_report, require_effect
from slime.core.engine_interface import is_installed


def activate() -> list[PatchReport]:
    """Applies the patches that the installed version needs and returns their reports. Idempotent.

    Raises `EngineError` if a patch had no effect.
    """
    return [] if is_installed("megatron-core", ">=0.19") else [_patch_moe_name()]


def _patch_moe_name() -> PatchReport:
    moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    require_effect(hasattr(moe_utils, "te_general_gemm"), "te_general_gemm")
    return megatron_report(
        "te_general_gemm",
        "NameError: te_general_gemm is not defined, in the router of an MoE layer",
        "the oldest supported version is 0.19, in which moe_utils defines the name",
        versions="before 0.19",
    )
