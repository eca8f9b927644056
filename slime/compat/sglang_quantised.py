"""Lets an engine with quantised weights load new weights repeatedly and report digests that cover every bit.

The hooks work around two SGLang problems with checkpoints that are quantised according to config.json:

- `/weights_checker` dequantises codes and scales to bfloat16 and reports one digest for the result. Rounding can hide a
  flipped bit in a scale. With these hooks, codes and scales have separate digests.
- After loading compressed-tensors weights, SGLang repacks them for its kernels (INT4 for Marlin, FP8 of dense layers
  transposed) into parameters that loaders do not support. The next weights then fail to load or are stored in the wrong
  place. These hooks restore the original parameters before the first tensor of an update and repack after the digests
  have been computed, so digests cover the loaded bits. Repacked weights overwrite the previous ones in place, because
  captured CUDA graphs read them.

SGLang 0.5.23 has weight-update sessions. It restores the experts' parameters when a session begins and repacks when it
ends, after the digests. The hooks do the same for dense layers, and prevent an update from disk from repacking before
the session ends. With 0.5.16, the first tensor triggers the restore, and the digest request triggers the repacking.

Invariants
1. From the first tensor of an update until the digests, the engine cannot serve. It is paused (`slime.weights.sync`).
2. After a failed update, the next update can still load its weights.

Remove the hooks when SGLang reports raw digests and restores dense layers as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slime.compat import Hook
from slime.compat.sglang_token_versions import MANAGER
from slime.core.engine_interface import BEFORE_SESSIONS, WITH_SESSIONS

PATH_FLAG = "--model-path"
_CHECKER = "sglang.srt.utils.weight_checker"
_REORDERED = ("CompressedTensorsWNA16", "CompressedTensorsWNA16MoE", "CompressedTensorsW8A8Fp8")
"""Quantisation schemes that repack weights into different parameters."""
NOT_WEIGHTS = ("weight_shape", "g_idx", "g_idx_sort_indices", "weight_zero_point")
"""Suffixes of parameters that do not affect results: shapes, and unused zero points and activation orders."""
_KEPT, _SERVED, _LOADING = "_slime_kept", "_slime_served", "_slime_loading"
_session = {"is_open": False}
"""Whether a weight-update session is open in this process."""


def is_quantised(model_path: str) -> bool:
    """Returns whether config.json in the folder `model_path` specifies a quantisation."""
    config = Path(model_path) / "config.json"
    found = json.loads(config.read_text()) if config.is_file() else {}
    return bool(found.get("quantization_config") or (found.get("text_config") or {}).get("quantization_config"))


def _nothing(_model: Any) -> dict[str, Any]:
    """Replaces SGLang's list of weights to dequantise with an empty one."""
    return {}


def _weights_alone(state: Callable[..., Iterator[tuple[str, Any]]], checker: Any) -> Iterator[tuple[str, Any]]:
    return ((name, tensor) for name, tensor in state(checker) if not name.endswith(NOT_WEIGHTS))


def _then_in_order(checksum: Callable[..., Any], checker: Any, *given: Any, **named: Any) -> Any:
    """Computes the digests, then repacks the loaded weights for the kernels."""
    report, model = checksum(checker, *given, **named), checker._get_model()
    if getattr(model, _LOADING, False):
        for module in _layers(model):
            module.quant_method.process_weights_after_loading(module)
        _serve(model)
    return report


def _before_update(manager: Any, *_: Any, **__: Any) -> None:
    _expect(manager.tp_worker.model_runner.model)


def _begin(begin: Callable[..., Any], manager: Any, request: Any) -> Any:
    answer = begin(manager, request)
    _session["is_open"] |= answer.success
    if answer.success:
        _expect(manager.tp_worker.model_runner.model)
    return answer


def _end(end: Callable[..., Any], manager: Any, request: Any) -> Any:
    answer = end(manager, request)
    _session["is_open"] &= not answer.success
    if answer.success:
        _serve(manager.tp_worker.model_runner.model)
    return answer


def _load(load: Callable[..., Any], model: Any, weights: Any, device: Any) -> None:
    """Loads weights from a folder, at startup or for an update."""
    if _session["is_open"]:
        model.load_weights(weights)
    elif not any(True for _ in _layers(model)):
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
    """Saves the original parameters and their attributes. Call it before weights are first loaded."""
    for module in _layers(model):
        kept = {name: (p, p.shape, p.dtype, dict(vars(p))) for name, p in module._parameters.items() if p is not None}
        setattr(module, _KEPT, kept)


def _expect(model: Any) -> None:
    """Restores the original parameters. Call it before new weights are loaded."""
    if getattr(model, _LOADING, True):
        return
    import torch

    for module in _layers(model):
        parameters, kept = module._parameters, getattr(module, _KEPT)
        workspaces = [(o, o.workspace) for o in (module, module.scheme) if hasattr(o, "workspace")]
        if type(module.scheme).__name__.endswith("MoE"):  # same parameters, different shapes
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
    """Copies repacked weights into the memory of the previous ones and frees the original parameters."""
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


HOOKS = (
    Hook("REPLACE", f"{_CHECKER}._build_quantized_set", _nothing),
    Hook("AROUND", f"{_CHECKER}.WeightChecker._model_state", _weights_alone),
    Hook("AROUND", f"{_CHECKER}.WeightChecker._compute_checksum", _then_in_order, BEFORE_SESSIONS),
    Hook("AROUND", "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_and_postprocess", _load),
    Hook("BEFORE", f"{MANAGER}.update_weights_from_tensor", _before_update, BEFORE_SESSIONS),
    Hook("BEFORE", f"{MANAGER}.update_weights_from_distributed", _before_update, BEFORE_SESSIONS),
    Hook("AROUND", f"{MANAGER}.begin_weight_update", _begin, WITH_SESSIONS),
    Hook("AROUND", f"{MANAGER}.end_weight_update", _end, WITH_SESSIONS),
)
