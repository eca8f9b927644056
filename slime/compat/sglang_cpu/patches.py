"""What SGLang's parts need on a CPU: grammar masks, latent attention, norms over all heads, images without torchvision,
routed experts. Each patch says what it is for and when it can go.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from slime.compat.patch_report import PatchReport
from slime.compat.sglang_cpu.after_import import after_import, is_in_place
from slime.core.errors import EngineError

# Answers that follow a JSON schema, a regular expression or a grammar, on a CPU.
#
# xgrammar, SGLang's default, computes which tokens may come next on any machine and brings a kernel for each kind of
# device. SGLang calls those for accelerators alone and refuses all others in the middle of a forward pass, which ends
# the scheduler and with it the server. On a CPU the mask goes to xgrammar's own function, which has a kernel for it.

APPLIES = "sglang.srt.constrained.xgrammar_backend"


def _apply(logits: Any, vocab_mask: Any) -> None:
    """Tokens whose bit is not set get -inf. `logits` [requests, V] on a CPU; `vocab_mask` [requests, V / 32] int32."""
    import xgrammar

    xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)


def _on_grammar(_grammar: Any, logits: Any, vocab_mask: Any) -> None:
    _apply(logits, vocab_mask)


def _use_cpu_kernel(module: types.ModuleType) -> None:
    module.XGrammarGrammar.apply_vocab_mask = _on_grammar
    module.XGrammarGrammarBackend.apply_vocab_mask = staticmethod(_apply)
    if _allowed_of_a_mask(module) != [1, 33]:
        raise EngineError(
            f"got no effect from the CPU patch of {APPLIES}, because SGLang or xgrammar changed; install the pinned "
            "versions or start engines with --sglang-grammar-backend none"
        )


def _allowed_of_a_mask(module: types.ModuleType) -> list[int]:
    """Which of 40 tokens SGLang's class leaves possible under a mask with bits 1 and 33 set."""
    import torch

    logits = torch.zeros(1, 40)
    mask = torch.tensor([[1 << 1, 1 << 1]], dtype=torch.int32)
    module.XGrammarGrammarBackend.apply_vocab_mask(logits=logits, vocab_mask=mask)
    return [i for i, logit in enumerate(logits[0].tolist()) if logit == 0]


def masks_on_a_cpu(upstream: str) -> PatchReport:
    """Sees to it that xgrammar's masks reach logits that live on a CPU."""
    after_import(APPLIES, _use_cpu_kernel)
    return PatchReport(
        name="grammar masks of xgrammar",
        symptom="RuntimeError: Unsupported device: cpu, at a request with json_schema or regex; the server ends",
        upstream=upstream,
        removal="apply_vocab_mask in xgrammar_backend.py knows the CPU",
        applied=True,
        took_effect=is_in_place(APPLIES),
    )


# Latent attention (DeepSeek-V3, GLM-4.7-Flash) on a CPU.
#
# For a prefill without a prefix SGLang expands keys and values per head and leaves them out of the cache that
# `torch_native` reads. That backend can do the other form, which works on the latents of the cache and which decoding
# uses anyway: it is registered for all passes, when SGLang imports the module that decides.

DECIDES = "sglang.srt.models.deepseek_common.attention_backend_handler"


def _register(module: types.ModuleType) -> None:
    module.AttentionBackendRegistry.register("torch_native", module._dispatch_mla_subtype)


def latents_in_every_pass(upstream: str) -> PatchReport:
    """Sees to it that `torch_native` gets the form of latent attention that works on latents."""
    after_import(DECIDES, _register)
    return PatchReport(
        name="latent attention on torch_native",
        symptom="RuntimeError about unequal head sizes in the first prefill of a model with latent attention",
        upstream=upstream,
        removal="SGLang registers a handler of torch_native in attention_backend_handler.py",
        applied=True,
        took_effect=is_in_place(DECIDES),
    )


# MiniMax-M2 on a CPU: norms of queries and keys over all heads.
#
# SGLang has a form of them for CPUs, and takes it only where the CPU has AMX; elsewhere it calls a kernel that asserts
# a GPU. The form is taken on every CPU, when SGLang imports the model.

MODEL = "sglang.srt.models.minimax_m2"


def _take_the_cpu_form(module: types.ModuleType) -> None:
    norms = module.MiniMaxM2QKRMSNorm
    norms._forward_naive = norms._forward_cpu


def norms_of_all_heads(upstream: str) -> PatchReport:
    """Sees to it that MiniMax-M2 norms queries and keys without a GPU's kernel."""
    after_import(MODEL, _take_the_cpu_form)
    return PatchReport(
        name="norms of all heads of MiniMax-M2",
        symptom="AssertionError in rms_sumsq_serial in the first forward pass of MiniMax-M2",
        upstream=upstream,
        removal="MiniMaxM2QKRMSNorm takes _forward_cpu on every CPU",
        applied=True,
        took_effect=is_in_place(MODEL),
    )


# Models that see images, on a CPU without torchvision.
#
# SGLang's processor for the Qwen-VL models imports Qwen3.5, which looks for a kernel of `sgl_kernel`'s CPU build by
# name; without it the processor is not there at all. The kernel's name exists here, and refuses to run.

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


# Routed experts on a CPU.
#
# SGLang keeps them on the host, in pinned memory, which only a GPU's driver gives. The cache is made of ordinary memory
# instead: the module that makes it gets a `torch` whose `zeros` takes no notice of `pin_memory`.
#
# A forward pass writes into one buffer on the device, which is copied to the host before the next pass. With overlapped
# scheduling the next pass runs before the copy is read, and a copy from a CPU to a CPU is the buffer itself: each token
# would get the experts of the token after it. So it is copied here.

RECORDS = "sglang.srt.state_capturer.base"


class _Unpinned(types.ModuleType):
    """torch, but for `zeros`."""

    def __init__(self, torch: types.ModuleType) -> None:
        super().__init__("torch")
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def zeros(self, *size: Any, pin_memory: bool = False, **options: Any) -> Any:
        """`torch.zeros` in ordinary memory."""
        return self._torch.zeros(*size, **options)


def _copied(output: Any, to_host: Callable[[Any], Any]) -> None:
    """`TopkCaptureOutput.map_device_tensors`, by a copy."""
    output.out_cache_loc, output.topk = (to_host(x).clone() for x in (output.out_cache_loc, output.topk))


def _change(module: Any) -> None:
    if not isinstance(module.torch, _Unpinned):
        module.torch = _Unpinned(module.torch)
    module.TopkCaptureOutput.map_device_tensors = _copied


def experts_on_the_host(upstream: str) -> PatchReport:
    """Sees to it that routed experts are kept without a GPU, and that they are those of their token."""
    after_import(RECORDS, _change)
    return PatchReport(
        name="routed experts on the host",
        symptom="with --enable-return-routed-experts a server does not start (RuntimeError about pinned memory), or "
        "returns the experts of the next token",
        upstream=upstream,
        removal="sglang/srt/state_capturer/base.py asks for pinned memory on a GPU only, and copies on a CPU, too",
        applied=True,
        took_effect=is_in_place(RECORDS),
    )
