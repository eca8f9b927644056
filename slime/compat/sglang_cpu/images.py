"""Models that see images, on a CPU without torchvision.

SGLang's processor for the Qwen-VL models imports Qwen3.5, which looks for a kernel of `sgl_kernel`'s CPU build by name;
without it the processor is not there at all. The kernel's name exists here, and refuses to run.
"""

from __future__ import annotations

from typing import Any

from slime.compat.report import PatchReport
from slime.core.errors import EngineError

KERNELS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
"""What is looked for when SGLang imports models that see images."""


def _missing(name: str) -> Any:
    def missing(*given: Any, **named: Any) -> Any:
        raise EngineError(f"got a call of torch.ops.sgl_kernel.{name}, which has no build for this CPU; use a GPU")

    return missing


def names_of_kernels(upstream: str) -> PatchReport:
    """Sees to it that SGLang's models that see images can be imported."""
    import torch

    absent = [name for name in KERNELS if not hasattr(torch.ops.sgl_kernel, name)]
    for name in absent:
        setattr(torch.ops.sgl_kernel, name, _missing(name))
    return PatchReport(
        name="kernels of models that see images",
        symptom="ValueError: No processor registered for architecture: ['Qwen3VLForConditionalGeneration']",
        upstream=upstream,
        removal="sglang/srt/models/qwen3_5.py looks for fused_sigmoid_mul_cpu where it calls it",
        applied=bool(absent),
        took_effect=all(hasattr(torch.ops.sgl_kernel, name) for name in KERNELS),
    )
