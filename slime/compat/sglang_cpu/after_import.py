"""Patches a module of SGLang right after it is imported, so that the patch itself need not import it."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec

Change = Callable[[types.ModuleType], None]


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Waits for the import of one module, patches it and uninstalls itself."""

    def __init__(self, module: str, change: Change) -> None:
        self.module, self._change = module, change

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        sys.meta_path.remove(self)
        real = importlib.util.find_spec(fullname)
        assert real is not None and real.loader is not None, f"{fullname} of SGLang is gone"
        self._loader = real.loader
        return importlib.util.spec_from_loader(fullname, self, origin=real.origin)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)


def after_import(module: str, change: Change) -> None:
    """Calls `change(module)` immediately if the module is loaded, else right after its import."""
    if module in sys.modules:
        change(sys.modules[module])
    elif not is_awaited(module):
        sys.meta_path.insert(0, _AfterImport(module, change))


def is_in_place(module: str) -> bool:
    """Returns whether `module` has been patched or will be on import."""
    return module in sys.modules or is_awaited(module)


def is_awaited(module: str) -> bool:
    return any(isinstance(finder, _AfterImport) and finder.module == module for finder in sys.meta_path)
