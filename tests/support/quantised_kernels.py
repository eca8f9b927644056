"""What a stock SGLang lacks to serve quantised weights on a CPU, for tests: a plugin of SGLang, in servers of a block.

Loaders, parameters, updates and digests stay SGLang's. Replaced are the products, by plain torch on dequantised
weights, and Marlin's order of INT4, by a transposed copy, which like Marlin's lies in parameters that no loader fills.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.weights.quantised.formats import PACKED, SCALE

NAME = "slime_test_kernels"


@contextlib.contextmanager
def kernels_in_servers(folder: Path) -> Iterator[None]:
    """Servers that are started in the block have them: SGLang finds plugins by what is installed."""
    about = folder / "plugins" / f"{NAME}-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n")
    (about / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{NAME} = {__name__}:install\n")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(about.parent), before)))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def install() -> None:
    """SGLang calls it before it loads a model."""
    import torch
    from sglang.srt.layers.quantization import fp8
    from sglang.srt.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w8a8_fp8,
        compressed_tensors_wNa16,
    )

    torch.cuda.get_device_capability = lambda *_: (9, 0)
    fp8._is_cpu = False
    fp8.Fp8LinearMethod.apply = _blocks
    fp8.Fp8MoEMethod.create_moe_runner = lambda *_: None
    fp8.Fp8MoEMethod.apply = _experts_of_blocks
    compressed_tensors_w8a8_fp8.CompressedTensorsW8A8Fp8.apply_weights = _rows
    int4 = compressed_tensors_wNa16.CompressedTensorsWNA16
    int4.process_weights_after_loading, int4.apply_weights = _transpose, _groups


def _blocks(_method: Any, layer: Any, x: Any, bias: Any = None) -> Any:
    import torch

    return torch.nn.functional.linear(x, _of_blocks(layer.weight, layer.weight_scale_inv, x.dtype), bias)


def _of_blocks(codes: Any, scales: Any, dtype: Any) -> Any:
    wide = scales.repeat_interleave(128, 0)[: codes.shape[0]].repeat_interleave(128, 1)[:, : codes.shape[1]]
    return (codes.float() * wide).to(dtype)


def _experts_of_blocks(_method: Any, layer: Any, dispatch_output: Any) -> Any:
    import torch
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x = dispatch_output.hidden_states
    out = torch.zeros_like(x)
    weights, chosen = dispatch_output.topk_output[:2]
    for token, place in zip(*torch.where(chosen >= 0), strict=True):
        expert = int(chosen[token, place])
        both = _of_blocks(layer.w13_weight[expert], layer.w13_weight_scale_inv[expert], x.dtype) @ x[token]
        gate, up = both.chunk(2)
        down = _of_blocks(layer.w2_weight[expert], layer.w2_weight_scale_inv[expert], x.dtype)
        out[token] += weights[token, place].to(x.dtype) * (down @ (torch.nn.functional.silu(gate) * up))
    return StandardCombineInput(hidden_states=out)


def _rows(_scheme: Any, layer: Any, x: Any, bias: Any = None) -> Any:
    """SGLang has transposed the codes."""
    import torch

    weight = layer.weight.t().float() * layer.weight_scale.float()
    return torch.nn.functional.linear(x, weight.to(x.dtype), bias)


def _transpose(_scheme: Any, layer: Any) -> None:
    import torch

    for name in (PACKED, SCALE):
        transposed = getattr(layer, name).data.t().contiguous()
        setattr(layer, name, torch.nn.Parameter(transposed, requires_grad=False))


def _groups(scheme: Any, layer: Any, x: Any, bias: Any = None) -> Any:
    import torch

    from slime.weights.quantised.formats import GroupedInt4

    parts = [getattr(layer, name).data.t() for name in (PACKED, SCALE)]
    weight = GroupedInt4(frozenset(), scheme.group_size).dequantise(parts)
    return torch.nn.functional.linear(x, weight.to(x.dtype), bias)
