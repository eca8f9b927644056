"""Accumulates weight gradients of Megatron's linear layers directly in float32, on GPUs without Apex.

Megatron's linear layers use Apex's extension `fused_weight_gradient_mlp_cuda` for this and reject
`gradient_accumulation_fusion` if it is not installed. `slime.ops.linear` does the same with torch. The rest of the
protocol is unchanged: a layer marks its weight (`grad_added_to_main_grad`) and returns a dummy gradient to autograd, so
the data-parallel wrapper's hook adds nothing.

Invariants
1. On a CPU, `activate` changes nothing: gradients are rounded to the model's dtype before the hook adds them.
2. The report says whether the patch took effect, and the log says why if it did not. The caller enables the fusion only
   if it did.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from dataclasses import dataclass
from typing import Any

from slime.compat import PatchReport, megatron_report, require_effect

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Extension:
    """The subset of Apex's extension that Megatron calls."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Any, grad: Any, total: Any) -> None:
        """Computes total += grad.T @ inputs. `total`: [out, in] float32; `grad`: [T, out]; `inputs`: [T, in]."""
        from slime.ops.linear import add_fused

        add_fused(total, grad, inputs)


def activate(device: Any) -> list[PatchReport]:
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
