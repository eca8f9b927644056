"""Megatron's gradients on GPUs without Transformer Engine and Apex.

The norm: without these packages, Megatron's fallback computes the norm of each gradient, reads it on the host and
scales each gradient separately, which takes about 300 synchronisations per optimizer step. With `activate_norm`, there
is one. Megatron still decides which gradients count, over which ranks they are summed and when they are clipped.

Weight gradients: to accumulate them directly in float32, Megatron's linear layers use Apex's extension
`fused_weight_gradient_mlp_cuda` and reject `gradient_accumulation_fusion` if it is not installed. `slime.ops.linear`
does the same with torch (`activate_weights`). The rest of the protocol is unchanged: a layer marks its weight
(`grad_added_to_main_grad`) and returns a dummy gradient to autograd, so the data-parallel wrapper's hook adds nothing.

Invariants
1. On a CPU, neither changes anything: the norm stays bitwise the same, and gradients are rounded to the model's dtype
   before the hook adds them.
2. `l2_norm` and `scale` do not synchronise. Megatron reads the norm once, after summing over ranks.
3. The report says whether weight gradients are accumulated in float32, and the log says why if they are not. The caller
   enables the fusion only if they are.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from dataclasses import dataclass
from typing import Any

from slime.compat import PatchReport, megatron_report, require_effect

logger = logging.getLogger(__name__)


def activate_norm(device: Any) -> list[PatchReport]:
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


@dataclass(frozen=True, slots=True)
class _Extension:
    """The subset of Apex's extension that Megatron calls."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Any, grad: Any, total: Any) -> None:
        """Computes total += grad.T @ inputs. `total`: [out, in] float32; `grad`: [T, out]; `inputs`: [T, in]."""
        from slime.ops.linear import add_fused

        add_fused(total, grad, inputs)


def activate_weights(device: Any) -> list[PatchReport]:
    """Installs the extension on a GPU. Idempotent. `device`: a `torch.device` or its name.

    If this torch cannot accumulate in float32, the report's `applied` and `took_effect` are False and the log says why.
    Raises `EngineError` if Megatron does not use the extension.
    """
    import torch

    from slime.ops.linear import fused_problem

    device = torch.device(device)
    if device.type == "cpu":
        return []
    problem = fused_problem(device)
    if problem is not None:
        logger.warning("weight gradients are rounded to the model's dtype before accumulation: %s", problem)
        return [_report(took_effect=False)]
    install(device)
    return [_report(took_effect=True)]


def install(device: Any) -> None:
    """Installs the extension in Megatron's linear-layer module and checks it with a backward pass on `device`."""
    import torch

    layers: Any = importlib.import_module("megatron.core.tensor_parallel.layers")
    layers.fused_weight_gradient_mlp_cuda = _Extension()
    layers._grad_accum_fusion_available = True
    weight: Any = torch.nn.Parameter(torch.ones(2, 3, device=device))
    weight.main_grad = torch.ones_like(weight, requires_grad=False)
    run, inputs = layers.LinearWithGradAccumulationAndAsyncCommunication, torch.ones(4, 3, device=device)
    given = [inputs, weight, None, True, False, False, None, 0, None]
    if "gtp_remat_size" in inspect.signature(run.forward).parameters:
        given.append(1)
    with torch.enable_grad():
        run.apply(*given).sum().backward()
    require_effect(weight.grad is None and bool((weight.main_grad == 5.0).all()), "weight gradients")


def _report(*, took_effect: bool) -> PatchReport:
    return megatron_report(
        "weight gradients",
        "'gradient_accumulation_fusion set to True but the custom CUDA extension is not found'; without it, "
        "each weight gradient is written in half precision, read back and added",
        "linear layers accumulate in float32 with torch.addmm if Apex is missing",
        took_effect=took_effect,
    )
