"""Computes and clips the gradient norm with one synchronisation on GPUs without Transformer Engine and Apex.

Without these packages, Megatron's fallback computes the norm of each gradient, reads it on the host and scales each
gradient separately, which takes about 300 synchronisations per optimizer step. With the patch, Megatron still decides
which gradients count, over which ranks they are summed and when they are clipped.

Invariants
1. On a CPU, `activate` changes nothing, so the norm stays bitwise the same.
2. Neither function synchronises. Megatron reads the norm once, after summing over ranks.
"""

from __future__ import annotations

import importlib
from typing import Any

from slime.compat import PatchReport, megatron_report, require_effect


def activate(device: Any) -> list[PatchReport]:
    """Makes Megatron's gradient clipping use torch's kernels on a GPU. Idempotent.

    `device`: a `torch.device` or its name. Raises `EngineError` if the patch had no effect.
    """
    import torch

    if torch.device(device).type == "cpu":
        return []
    clip: Any = importlib.import_module("megatron.core.optimizer.clip_grads")
    if clip.l2_norm_impl is not l2_norm and clip.l2_norm_impl.__name__ != "local_multi_tensor_l2_norm":
        return []  # Transformer Engine or Apex is installed
    clip.l2_norm_impl, clip.multi_tensor_scale_impl = l2_norm, scale
    ones = [torch.ones(3), torch.ones(2, 3)]
    norm, _ = clip.multi_tensor_applier(clip.l2_norm_impl, None, [ones], False)
    clip.multi_tensor_applier(clip.multi_tensor_scale_impl, None, [ones, ones], 0.5)
    require_effect(float(norm) == 3.0 and float(ones[1].sum()) == 3.0, "gradient norm")
    return [
        megatron_report(
            "gradient norm",
            "the host waits for the device once per gradient to read its norm",
            "local_multi_tensor_l2_norm uses torch._foreach_norm and stays on the device",
        )
    ]


def l2_norm(_chunk_size: int, _noop: Any, tensor_lists: Any, *_per_tensor: Any) -> tuple[Any, None]:
    """Returns the total Euclidean norm of all tensors in the first list: float32 [1] on the device."""
    import torch

    tensors = [tensor for tensor in tensor_lists[0] if tensor.numel()]
    if not tensors:
        device = tensor_lists[0][0].device if tensor_lists[0] else torch.get_default_device()
        return torch.zeros(1, device=device), None
    norms = torch.stack(torch._foreach_norm(tensors))
    return torch.linalg.vector_norm(norms, dtype=torch.float32).reshape(1), None


def scale(_chunk_size: int, _noop: Any, tensor_lists: Any, factor: float) -> None:
    """Sets each tensor in the second list to `factor` times its counterpart in the first. The lists can be the same."""
    import torch

    source, target = tensor_lists
    if any(a is not b for a, b in zip(source, target, strict=True)):
        torch._foreach_copy_(target, source)
    if target:
        torch._foreach_mul_(target, factor)
