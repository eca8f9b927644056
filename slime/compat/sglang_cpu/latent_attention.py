"""Latent attention (DeepSeek-V3, GLM-4.7-Flash) on a CPU.

For a prefill without a prefix SGLang expands keys and values per head and leaves them out of the cache that
`torch_native` reads. That backend can do the other form, which works on the latents of the cache and which decoding
uses anyway: it is registered for all passes, when SGLang imports the module that decides.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import types
from importlib.machinery import ModuleSpec

from slime.compat.report import PatchReport

DECIDES = "sglang.srt.models.deepseek_common.attention_backend_handler"


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Registers as soon as the module is imported, once."""

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if fullname != DECIDES:
            return None
        sys.meta_path.remove(self)
        real = importlib.util.find_spec(fullname)
        assert real is not None and real.loader is not None, f"{fullname} of SGLang is gone"
        self.loader = real.loader
        return importlib.util.spec_from_loader(fullname, self, origin=real.origin)

    def exec_module(self, module: types.ModuleType) -> None:
        self.loader.exec_module(module)
        _register(module)


def _register(module: types.ModuleType) -> None:
    module.AttentionBackendRegistry.register("torch_native", module._dispatch_mla_subtype)


def latents_in_every_pass(upstream: str) -> PatchReport:
    """Sees to it that `torch_native` gets the form of latent attention that works on latents."""
    if DECIDES in sys.modules:
        _register(sys.modules[DECIDES])
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())
    return PatchReport(
        name="latent attention on torch_native",
        symptom="RuntimeError about unequal head sizes in the first prefill of a model with latent attention",
        upstream=upstream,
        removal="SGLang registers a handler of torch_native in attention_backend_handler.py",
        applied=True,
        took_effect=DECIDES in sys.modules or any(isinstance(finder, _AfterImport) for finder in sys.meta_path),
    )
