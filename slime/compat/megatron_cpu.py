"""Makes stock megatron-core run on a CPU (`activate("cpu")`) without modifying `torch` itself.

Megatron hardcodes the device (`device="cuda"`, `torch.cuda.current_device()`, type names such as
`torch.cuda.FloatTensor`). Each of Megatron's modules has a global `torch`. On a CPU, the patch replaces these globals
with a facade of `torch` that returns CPU values. This does not affect `torch` itself, or SGLang and transformers in the
same process.

Invariants
1. `activate("cuda")` changes nothing.
2. Every patch verifies that it took effect and raises `EngineError` if it did not.
3. Only module-level names in modules under `megatron.core` are changed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from slime.compat import PatchReport, megatron_report, require_effect
from slime.core.errors import EngineError

_USED_MODULES = (
    "megatron.core.parallel_state",
    "megatron.core.tensor_parallel",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.distributed",
    "megatron.core.distributed.finalize_model_grads",
    "megatron.core.optimizer",
    "megatron.core.optimizer_param_scheduler",
)
"""Modules to import before patching, so that all modules used by the trainer get the facade."""

_FACTORIES = (
    *("tensor", "as_tensor", "arange", "rand", "randn", "randint"),
    *("zeros", "ones", "empty", "full", "zeros_like", "ones_like", "empty_like", "full_like"),
)


def activate(device: str) -> list[PatchReport]:
    """Applies all patches and returns their reports if `device` is "cpu". Does nothing for "cuda". Idempotent.

    Raises `EngineError` if a patch had no effect, for example because the upstream version is different, and for "cuda"
    in a process that has already been patched, whose modules would be built on the CPU.
    """
    if device != "cpu":
        megatron = sys.modules.get(_USED_MODULES[0])
        if megatron is not None and isinstance(megatron.__dict__.get("torch"), _CpuTorch):
            raise EngineError("this process has trained on a CPU, so it cannot train on a GPU; use another process")
        return []
    for name in _USED_MODULES:
        importlib.import_module(name)
    patches = (_patch_torch_facade, _patch_rng, _patch_type_names)
    return [patch() for patch in patches]


class _Inert:
    """A stand-in for CUDA streams and events. All methods are no-ops."""

    def __init__(self, *_given: Any, **_named: Any) -> None: ...

    def __getattr__(self, _name: str) -> Callable[..., Any]:
        return lambda *_given, **_named: self

    def __enter__(self) -> _Inert:
        return self

    def __exit__(self, *_exc: object) -> None: ...


class _CpuCuda(types.ModuleType):
    """A facade of `torch.cuda` that returns CPU values."""

    Stream = Event = _Inert

    def __init__(self, torch: Any) -> None:
        super().__init__("torch.cuda (on a CPU)")
        self._torch = torch
        self.nvtx = _Inert()
        self.current_device = lambda: torch.device("cpu")
        self.get_rng_state = lambda *_a, **_k: torch.get_rng_state()
        self.set_rng_state = lambda state, *_a, **_k: torch.set_rng_state(state)
        self.manual_seed = self.manual_seed_all = torch.manual_seed
        self.is_available = lambda: False
        self.device_count = lambda: 0
        self.stream = lambda *_a, **_k: contextlib.nullcontext()
        self.current_stream = self.default_stream = lambda *_a, **_k: _Inert()
        self.synchronize = self.empty_cache = self.set_device = lambda *_a, **_k: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch.cuda, name)


class _CpuTorch(types.ModuleType):
    """A facade of `torch` that treats `device="cuda"` as the CPU."""

    def __init__(self, torch: Any) -> None:
        super().__init__("torch (on a CPU)")
        self._torch = torch
        self.cuda = _CpuCuda(torch)
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = "cpu"
        named.pop("pin_memory", None)
        return function(*given, **named)

    return call


def _patch_torch_facade() -> PatchReport:
    import torch

    facade: Any = None
    for name, module in sys.modules.copy().items():  # a copy, because threads or finalizers may import modules
        if not name.startswith("megatron.core"):
            continue
        held = vars(module).get("torch")
        if isinstance(held, _CpuTorch):
            facade = facade or held
        elif held is torch:
            facade = facade or _CpuTorch(torch)
            module.__dict__["torch"] = facade
    clip = importlib.import_module("megatron.core.optimizer.clip_grads")
    buffers = importlib.import_module("megatron.core.distributed.param_and_grad_buffer")
    took = clip.torch.zeros(1, device="cuda").device.type == "cpu" and str(buffers.torch.cuda.current_device()) == "cpu"
    require_effect(took, "torch facade")
    return megatron_report(
        "torch facade",
        "AssertionError: Torch not compiled with CUDA enabled, from device='cuda' and torch.cuda.* in library code",
        "megatron-core takes its device from its configuration",
    )


def _patch_rng() -> PatchReport:
    import torch

    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    if not getattr(random, "_slime_cpu_rng", False):
        random._get_cuda_rng_state = lambda *_a, **_k: torch.get_rng_state()
        random._set_cuda_rng_state = lambda state, *_a, **_k: torch.set_rng_state(state)
        random._slime_cpu_rng = True
    before = torch.get_rng_state()
    random._set_cuda_rng_state(random._get_cuda_rng_state())
    require_effect(bool(torch.equal(before, torch.get_rng_state())), "rng")
    return megatron_report(
        "rng",
        "CudaRNGStatesTracker.fork, used by dropout and weight initialisation, reads a GPU's generator state",
        "the tracker takes a torch.Generator",
    )


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    """Within the block, makes `Tensor.type()` of CPU tensors return the CUDA name that the optimizer expects."""
    import torch

    original = torch.Tensor.type

    def type_name(self: Any, *given: Any, **named: Any) -> Any:
        result = original(self, *given, **named)
        if isinstance(result, str) and not result.startswith("torch.cuda."):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    torch.Tensor.type = type_name  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]


def _with_cuda_type_names(owner: Any, name: str) -> None:
    """Wraps `owner.name` in `_cuda_type_names`, once."""
    function = getattr(owner, name)
    if getattr(function, "_slime_cuda_type_names", False):
        return

    @functools.wraps(function)
    def wrapped(*given: Any, **named: Any) -> Any:
        with _cuda_type_names():
            return function(*given, **named)

    wrapped._slime_cuda_type_names = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def _patch_type_names() -> PatchReport:
    import torch

    optimizer = importlib.import_module("megatron.core.optimizer.optimizer")
    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    clip = importlib.import_module("megatron.core.optimizer.clip_grads")
    _with_cuda_type_names(distributed.DistributedOptimizer, "__init__")
    _with_cuda_type_names(optimizer.Float16OptimizerWithFloat16Params, "__init__")
    for module in (optimizer, clip):  # the optimizer imports the function by name
        _with_cuda_type_names(module, "clip_grad_by_total_norm_fp32")
    parameter = torch.zeros(2)
    parameter.grad = torch.ones(2)
    optimizer.clip_grad_by_total_norm_fp32([parameter], 1.0, 2.0)
    require_effect(float(parameter.grad[0]) < 1.0 and parameter.type() == "torch.FloatTensor", "type names")
    return megatron_report(
        "type names",
        "TypeError: Wrapped parameters must be one of torch.cuda.FloatTensor ... in DistributedOptimizer",
        "the optimizer compares dtypes instead of type names",
    )
