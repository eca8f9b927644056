"""MiniMax-M2 on a CPU: norms of queries and keys over all heads.

SGLang has a form of them for CPUs, and takes it only where the CPU has AMX; elsewhere it calls a kernel that asserts a
GPU. The form is taken on every CPU, when SGLang imports the model.
"""

from __future__ import annotations

import types

from slime.compat.report import PatchReport
from slime.compat.sglang_cpu.after_import import after_import, is_in_place

MODEL = "sglang.srt.models.minimax_m2"


def _take_the_cpu_form(module: types.ModuleType) -> None:
    norms = module.MiniMaxM2QKRMSNorm
    norms._forward_naive = norms._forward_cpu


def norms_of_all_heads(upstream: str) -> PatchReport:
    """Sees to it that MiniMax-M2 norms queries and keys without a GPU's kernel."""
    after_import(MODEL, _take_the_cpu_form)
    return PatchReport(
        name="norms of all heads of MiniMax-M2",
        symptom="AssertionError in rms_sumsq_serial in the first forward pass of MiniMax-M2",
        upstream=upstream,
        removal="MiniMaxM2QKRMSNorm takes _forward_cpu on every CPU",
        applied=True,
        took_effect=is_in_place(MODEL),
    )
