"""Stand-ins for `torchvision` and `sgl_kernel`, which SGLang imports but which have no suitable CPU build.

A stand-in is a package in which every name exists. Capitalised names are empty classes; all others are functions that
raise `EngineError` when called. Dunder names do not exist, so that `inspect`, `copy` and `pickle` work.
"""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import types
from collections.abc import Callable, Sequence
from typing import Any

from slime.core.errors import EngineError

STAND_INS: dict[str, str] = {"torchvision": "0.0.0", "sgl_kernel": "0.4.5"}
"""Modules with the versions that their stand-ins report. SGLang checks the version of `sgl_kernel`."""


class InterpolationMode(enum.Enum):
    """Replaces `torchvision.transforms.InterpolationMode`. transformers reads its members on import."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _AnyAttribute(type):
    """Metaclass for stand-in classes. Looking up any class attribute (enum member, type code) returns its name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


def _placeholder(module: str, name: str) -> Any:
    """Returns a class for a capitalised name or `scalar_types` (a namespace of type codes), else a stub that raises."""
    if module.startswith("torchvision.transforms") and name == "InterpolationMode":
        return InterpolationMode
    if name[0].isupper() or name == "scalar_types":
        return _AnyAttribute(name, (), {"__module__": module})
    qualified = f"{module}.{name}"

    def missing(*given: Any, **named: Any) -> Any:
        raise EngineError(
            f"{qualified} is not available on this CPU: the model or a flag requires a GPU kernel; use "
            "--sglang-attention-backend torch_native and a dense model, or a GPU machine"
        )

    missing.__name__ = missing.__qualname__ = name
    missing.__module__ = module
    return missing


def _module_getattr(module: types.ModuleType) -> Callable[[str], Any]:
    def getattr_(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _placeholder(module.__name__, name)
        module.__dict__[name] = value  # the same object each time, so that isinstance and identity work
        return value

    return getattr_


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and creates the stand-in `root` and its submodules."""

    def __init__(self, root: str) -> None:
        self.root = root

    def covers(self, name: str) -> bool:
        return name == self.root or name.startswith(self.root + ".")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not self.covers(fullname):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin="slime stand-in", is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name, f"Stand-in for {spec.name}: names without kernels.")
        module.__version__ = STAND_INS[self.root]  # type: ignore[attr-defined]
        module.__slime_stand_in__ = True  # type: ignore[attr-defined]
        module.__getattr__ = _module_getattr(module)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Does nothing, because names are created on access."""
