"""Lets an engine of quantised weights take them again and again, and report every bit of what it took.

What SGLang 0.5.16 does without it, for checkpoints whose config.json names a quantisation:

- `/weights_checker` reports one digest for codes and scales together, of what they dequantise to in bfloat16: a flipped
  bit of a scale is rounded away. Here each is a tensor of its own.
- Weights of compressed-tensors are put in another order once they are loaded (INT4 in Marlin's, FP8 of dense layers
  transposed), as other parameters, which no loader can fill again: the next weights end in an error, or where they do
  not belong. Here the parameters that loaders fill come back before the first tensor of an update, and their memory
  with them. They are put in order as soon as their digests have been taken: what is reported is what was loaded, bit
  for bit, and what SGLang's own code then makes of it goes where the last one was, for captured CUDA graphs read it
  there.

Consumes: weight updates and the request for digests that ends each weight sync, in every scheduler. Produces: engines
in the order of their kernels. Waits for nothing; the requests of the sender wake it.

Invariants
1. Between the first tensor of an update and the digests the engine cannot serve: it is paused (`slime.weights.sync`).
2. An update that failed half-way leaves parameters that the next one fills.

To be removed when SGLang reports raw digests and puts weights in order again itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slime.compat.sglang_token_versions import MANAGER

PATH_FLAG = "--model-path"
_CHECKER = "sglang.srt.utils.weight_checker"
_LOADER = "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_and_postprocess"
_UPDATES = tuple(f"{MANAGER}.update_weights_from_{source}" for source in ("tensor", "distributed"))
_REORDERED = ("CompressedTensorsWNA16", "CompressedTensorsWNA16MoE", "CompressedTensorsW8A8Fp8")
"""Schemes that put weights in the order of their kernels, as other parameters: Marlin's, and transposed."""
NOT_WEIGHTS = ("weight_shape", "g_idx", "g_idx_sort_indices", "weight_zero_point")
"""Ends of parameters that say nothing: shapes, and what codes without a zero point or activation order do not use."""
_KEPT, _SERVED, _LOADING = "_slime_kept", "_slime_served", "_slime_loading"


def is_quantised(model_path: str) -> bool:
    """Whether a folder's config.json names a quantisation."""
    config = Path(model_path) / "config.json"
    return config.is_file() and '"quantization_config"' in config.read_text() and _names_one(config)


def _names_one(config: Path) -> bool:
    found = json.loads(config.read_text())
    return bool(found.get("quantization_config") or (found.get("text_config") or {}).get("quantization_config"))


def register() -> None:
    """Call before SGLang's scheduler loads its plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_CHECKER}._build_quantized_set", _nothing, HookType.REPLACE)
    HookRegistry.register(f"{_CHECKER}.WeightChecker._model_state", _weights_alone, HookType.AROUND)
    HookRegistry.register(f"{_CHECKER}.WeightChecker._compute_checksum", _then_in_order, HookType.AROUND)
    HookRegistry.register(_LOADER, _load, HookType.AROUND)
    for update in _UPDATES:
        HookRegistry.register(update, _before_update, HookType.BEFORE)


def _nothing(_model: Any) -> dict[str, Any]:
    """In place of the pairs of codes and scales that SGLang would dequantise."""
    return {}


def _weights_alone(state: Callable[..., Iterator[tuple[str, Any]]], checker: Any) -> Iterator[tuple[str, Any]]:
    return ((name, tensor) for name, tensor in state(checker) if not name.endswith(NOT_WEIGHTS))


def _then_in_order(checksum: Callable[..., Any], checker: Any) -> Any:
    """Around taking digests: then what was loaded is put in the order of the kernels."""
    report, model = checksum(checker), checker._get_model()
    if getattr(model, _LOADING, False):
        for module in _layers(model):
            module.quant_method.process_weights_after_loading(module)
        _serve(model)
    return report


def _before_update(manager: Any, *_: Any, **__: Any) -> None:
    _expect(manager.tp_worker.model_runner.model)


def _load(load: Callable[..., Any], model: Any, weights: Any, device: Any) -> None:
    """Around loading a folder, at the start and for an update."""
    if not any(True for _ in _layers(model)):
        load(model, weights, device)
    elif not hasattr(model, _LOADING):
        _keep(model)
        load(model, weights, device)
        _serve(model)
    else:
        _expect(model)
        model.load_weights(weights)


def _layers(model: Any) -> Iterator[Any]:
    return (m for m in model.modules() if type(getattr(m, "scheme", None)).__name__ in _REORDERED)


def _keep(model: Any) -> None:
    """Before the first weights: remembers the parameters that loaders fill, and what they say of themselves."""
    for module in _layers(model):
        kept = {name: (p, p.shape, p.dtype, dict(vars(p))) for name, p in module._parameters.items() if p is not None}
        setattr(module, _KEPT, kept)


def _expect(model: Any) -> None:
    """Before new weights: the parameters that loaders fill are there."""
    if getattr(model, _LOADING, True):
        return
    import torch

    for module in _layers(model):
        parameters, kept = module._parameters, getattr(module, _KEPT)
        workspaces = [(o, o.workspace) for o in (module, module.scheme) if hasattr(o, "workspace")]
        if hasattr(module.scheme, "restore_weights_before_loading"):  # experts: the same parameters, in other shapes
            setattr(module, _SERVED, ({}, workspaces))
            module.scheme.restore_weights_before_loading(module)
            continue
        served = {name: parameter for name, parameter in parameters.items() if parameter is not None}
        setattr(module, _SERVED, (served, workspaces))
        device = next(iter(served.values())).device
        for name in served.keys() - kept.keys():
            del parameters[name]
        for name, (parameter, shape, dtype, says) in kept.items():
            if parameter.shape != shape or not parameter.numel():
                parameter.data = torch.empty(shape, dtype=dtype, device=device)
            vars(parameter).update(says)
            parameters[name] = parameter
    setattr(model, _LOADING, True)


def _serve(model: Any) -> None:
    """After SGLang put weights in order: they go where the last ones were; what loaders fill gives its memory back."""
    for module in _layers(model):
        served, workspaces = getattr(module, _SERVED, ({}, ()))
        for name, last in served.items():
            new = module._parameters.get(name)
            if new is not None and new is not last and new.shape == last.shape and new.dtype == last.dtype:
                last.data.copy_(new.data)
                module._parameters[name] = last
        for owner, workspace in workspaces:
            owner.workspace = workspace
        for name, (parameter, *_) in getattr(module, _KEPT).items():
            if module._parameters.get(name) is not parameter:
                parameter.data = parameter.data.new_empty(0)
        if hasattr(module, _SERVED):
            delattr(module, _SERVED)
    setattr(model, _LOADING, False)
