"""Latent attention (DeepSeek-V3, GLM-4.7-Flash) on a CPU.

For a prefill without a prefix SGLang expands keys and values per head and leaves them out of the cache that
`torch_native` reads. That backend can do the other form, which works on the latents of the cache and which decoding
uses anyway: it is registered for all passes, when SGLang imports the module that decides.
"""

from __future__ import annotations

import types

from slime.compat.report import PatchReport
from slime.compat.sglang_cpu.after_import import after_import, is_in_place

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
