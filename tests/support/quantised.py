"""Checkpoints in quantised formats, made of plain ones: codes and scales of linear layers, everything else as it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from slime.weights.quantised import formats
from slime.weights.quantised.formats import PACKED, SHAPE, QuantisedFormat, format_of

FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}

SHAPES = [(128, 128), (256, 384), (576, 256), (130, 200), (1, 128), (64, 32), (100, 640), (3, 256, 128), (2, 2, 64, 96)]
"""Of weights: whole blocks, blocks that end early, less than a block, stacks."""


def random_weight(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Blocks of different sizes, one of them of zeros, and tiny entries."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(*shape[:-1], 1, generator=generator).mul(8).exp()
    weight = torch.randn(shape, generator=generator) * rows * 1e-4
    weight[..., :4, :32] = 0
    weight[..., -1:, :] *= 1e-5
    return weight.to(dtype)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def float_quantized(ignored: list[str]) -> dict[str, Any]:
    """`quantization_config` of compressed-tensors for FP8 with a scale for each output feature."""
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "strategy": "channel", "dynamic": False},
        "input_activations": {**common, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }


def int4(group: int, ignored: list[str]) -> dict[str, Any]:
    """`quantization_config` of compressed-tensors."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ignored,
    }


def write_quantised(
    source: Path, target: Path, kind: str, *, group: int = 32, only: str = ""
) -> tuple[Path, QuantisedFormat]:
    """A folder of `kind` ("fp8", "ue8m0", "channels" or "int4") made of the plain folder `source`, and its format.

    `only`: a part of the names that are quantised.
    """

    def chosen(name: str) -> bool:
        return formats.quantises(name) and only in name

    state: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            state |= dict(formats.apart(name, tensor))
    kept = [n for n in state if n.endswith(".weight") and not chosen(n)]
    modules = [n.removesuffix(".weight") for n in kept]
    modules += ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"] if only else []
    by_kind = {"int4": int4(group, modules), "channels": float_quantized(modules)}
    entry = by_kind.get(kind) or {**FP8, "modules_to_not_convert": modules}
    entry |= {"scale_fmt": "ue8m0"} if kind == "ue8m0" else {}
    weights = [n for n in state if chosen(n)]
    part = {"int4": PACKED, "channels": "weight_scale"}.get(kind, "weight_scale_inv")
    marks = [n.removesuffix("weight") + part for n in weights]
    found = format_of({"quantization_config": entry}, [*state, *marks])
    assert found is not None and found.names == set(weights)
    out: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if name not in found.names:
            out[name] = tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
            continue
        out |= dict(found.one_by_one([name], tensor.bfloat16().unsqueeze(0)))
        if kind == "int4":
            out[name.removesuffix("weight") + SHAPE] = torch.tensor(tensor.shape)
    target.mkdir(parents=True, exist_ok=True)
    for asset in source.iterdir():
        if asset.is_file() and "safetensors" not in asset.name:
            shutil.copy(asset, target / asset.name)
    save_file({n: t.contiguous() for n, t in out.items()}, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config |= {"quantization_config": entry, "dtype": "bfloat16"}
    config.pop("torch_dtype", None)
    (target / "config.json").write_text(json.dumps(config))
    return target, found
