"""Patches that make features of SGLang work on a CPU: grammar masks, latent attention, norms over all heads, vision
models, routed experts. Each report gives the symptom and says when the patch can be removed."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from slime.compat.patch_report import SGLANG, PatchReport
from slime.compat.sglang_cpu.after_import import Change, after_import, is_in_place
from slime.core.errors import EngineError


def _patched(module: str, change: Change, *, name: str, symptom: str, removal: str) -> PatchReport:
    """Applies `change` to `module` when SGLang imports it."""
    after_import(module, change)
    return PatchReport(name, symptom, SGLANG, removal, applied=True, took_effect=is_in_place(module))


GRAMMARS = "sglang.srt.constrained.xgrammar_backend"


def _apply(logits: Any, vocab_mask: Any) -> None:
    """Sets logits [requests, V] to -inf for tokens whose bit in `vocab_mask` [requests, V / 32] int32 is not set."""
    import xgrammar

    xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)


def _on_grammar(_grammar: Any, logits: Any, vocab_mask: Any) -> None:
    _apply(logits, vocab_mask)


def _use_cpu_kernel(module: types.ModuleType) -> None:
    module.XGrammarGrammar.apply_vocab_mask = _on_grammar
    module.XGrammarGrammarBackend.apply_vocab_mask = staticmethod(_apply)
    if _allowed_of_a_mask(module) != [1, 33]:
        raise EngineError(
            f"the CPU patch of {GRAMMARS} had no effect: SGLang or xgrammar has changed; install the pinned "
            "versions or start engines with --sglang-grammar-backend none"
        )


def _allowed_of_a_mask(module: types.ModuleType) -> list[int]:
    """Returns which of 40 tokens SGLang's class allows for a mask with bits 1 and 33 set."""
    import torch

    logits = torch.zeros(1, 40)
    mask = torch.tensor([[1 << 1, 1 << 1]], dtype=torch.int32)
    module.XGrammarGrammarBackend.apply_vocab_mask(logits=logits, vocab_mask=mask)
    return [i for i, logit in enumerate(logits[0].tolist()) if logit == 0]


def masks_on_a_cpu() -> PatchReport:
    """Makes SGLang apply the masks of xgrammar (its default) with xgrammar's own function, which supports CPUs.

    SGLang's own function supports only accelerators and fails on a CPU in the middle of a forward pass.
    """
    return _patched(
        GRAMMARS,
        _use_cpu_kernel,
        name="grammar masks of xgrammar",
        symptom="RuntimeError: Unsupported device: cpu, on a request with json_schema or regex; the server exits",
        removal="apply_vocab_mask in xgrammar_backend.py supports the CPU",
    )


def _register(module: types.ModuleType) -> None:
    module.AttentionBackendRegistry.register("torch_native", module._dispatch_mla_subtype)


def latents_in_every_pass() -> PatchReport:
    """Makes latent attention (DeepSeek-V3, GLM-4.7-Flash) work on `torch_native`.

    For a prefill without a prefix, SGLang expands keys and values per head and does not write them to the cache that
    this backend reads. With the patch, every pass uses the cached latents, as decoding always does.
    """
    return _patched(
        "sglang.srt.models.deepseek_common.attention_backend_handler",
        _register,
        name="latent attention on torch_native",
        symptom="RuntimeError about unequal head sizes in the first prefill of a model with latent attention",
        removal="SGLang registers a handler for torch_native in attention_backend_handler.py",
    )


def _take_the_cpu_form(module: types.ModuleType) -> None:
    norms = module.MiniMaxM2QKRMSNorm
    norms._forward_naive = norms._forward_cpu


def norms_of_all_heads() -> PatchReport:
    """Makes MiniMax-M2's QK norms use SGLang's CPU implementation. Without AMX, SGLang calls a GPU kernel."""
    return _patched(
        "sglang.srt.models.minimax_m2",
        _take_the_cpu_form,
        name="norms of all heads of MiniMax-M2",
        symptom="AssertionError in rms_sumsq_serial in the first forward pass of MiniMax-M2",
        removal="MiniMaxM2QKRMSNorm uses _forward_cpu on every CPU",
    )


KERNELS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
"""Kernels that SGLang looks up when it imports vision models."""


def _missing(name: str) -> Any:
    def missing(*given: Any, **named: Any) -> Any:
        raise EngineError(f"torch.ops.sgl_kernel.{name} is not available on this CPU; use a GPU")

    return missing


def names_of_kernels() -> PatchReport:
    """Defines missing kernels of `sgl_kernel`'s CPU build as functions that raise. SGLang's Qwen-VL processor imports
    Qwen3.5, which looks them up; if the lookup fails, the processor is not registered.
    """
    import torch

    absent = [name for name in KERNELS if not hasattr(torch.ops.sgl_kernel, name)]
    for name in absent:
        setattr(torch.ops.sgl_kernel, name, _missing(name))
    return PatchReport(
        name="kernels of vision models",
        symptom="ValueError: No processor registered for architecture: ['Qwen3VLForConditionalGeneration']",
        upstream=SGLANG,
        removal="sglang/srt/models/qwen3_5.py looks up fused_sigmoid_mul_cpu only when it calls it",
        applied=bool(absent),
        took_effect=all(hasattr(torch.ops.sgl_kernel, name) for name in KERNELS),
    )


class _Unpinned(types.ModuleType):
    """A facade of torch whose `zeros` ignores `pin_memory`."""

    def __init__(self, torch: types.ModuleType) -> None:
        super().__init__("torch")
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def zeros(self, *size: Any, pin_memory: bool = False, **options: Any) -> Any:
        return self._torch.zeros(*size, **options)


def _copied(output: Any, to_host: Callable[[Any], Any]) -> None:
    """Replaces `TopkCaptureOutput.map_device_tensors`. Copies even if `to_host` returns the same memory."""
    output.out_cache_loc, output.topk = (to_host(x).clone() for x in (output.out_cache_loc, output.topk))


def _ordinary_memory(size: Any, *, dtype: Any, device: str, **_: Any) -> Any:
    """Replaces SGLang's function that allocates pinned memory."""
    import torch

    return torch.empty(size, dtype=dtype, device=device)


def _change(module: Any) -> None:
    if hasattr(module, "ALLOC_MEMORY_FUNCS"):  # 0.5.23
        module.ALLOC_MEMORY_FUNCS["cpu"] = _ordinary_memory
    elif not isinstance(module.torch, _Unpinned):
        module.torch = _Unpinned(module.torch)
    module.TopkCaptureOutput.map_device_tensors = _copied


def experts_on_the_host() -> PatchReport:
    """Makes routed experts work on a CPU: stores them in ordinary memory, because pinned memory requires a GPU driver,
    and copies them.

    Each forward pass writes the experts to one device buffer, which SGLang copies to the host before the next pass.
    With overlapped scheduling, the next pass runs before the copy is read. On a CPU, SGLang's "copy" is the buffer
    itself, so each token would get the next token's experts.
    """
    return _patched(
        "sglang.srt.state_capturer.base",
        _change,
        name="routed experts on the host",
        symptom="with --enable-return-routed-experts a server does not start (RuntimeError about pinned memory), or "
        "returns the experts of the next token",
        removal="sglang/srt/state_capturer/base.py requests pinned memory only on a GPU and also copies on a CPU",
    )
