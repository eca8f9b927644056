"""Makes stock SGLang work on a machine without a GPU.

`sglang_patches` calls `activate(device)` in each server process before SGLang is imported. Importing this package
changes nothing, and neither does `activate("cuda")`.

Invariants
1. A stand-in never shadows a module that can be imported.
2. A stand-in never computes: calling one of its kernels raises an error that names the kernel.
3. `activate` verifies each patch after applying it and raises `EngineError` if it had no effect.
4. Calling `activate` again changes nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

from slime.compat import SGLANG, PatchReport
from slime.compat.sglang_cpu.patches import (
    attention_of_a_batch,
    experts_on_the_host,
    latents_in_every_pass,
    masks_on_a_cpu,
    names_of_kernels,
    norms_of_all_heads,
    pairs_without_pinned_memory,
)
from slime.compat.sglang_cpu.stand_ins import STAND_INS, StandInFinder
from slime.core.errors import EngineError


def is_importable(name: str) -> bool:
    """Returns whether the real module `name` can be imported. False if built for another CPU or torch version."""
    module = sys.modules.get(name)
    if module is not None:
        return not getattr(module, "__slime_stand_in__", False)
    if any(isinstance(finder, StandInFinder) and finder.covers(name) for finder in sys.meta_path):
        return False
    try:
        if importlib.util.find_spec(name) is None:
            return False
        importlib.import_module(name)
    except Exception:  # extensions built for other machines raise ImportError, OSError, RuntimeError, ...
        for loaded in [m for m in sys.modules if m == name or m.startswith(name + ".")]:
            del sys.modules[loaded]
        return False
    return True


def activate(device: str) -> list[PatchReport]:
    """Makes stock SGLang work in this process if `device` is "cpu". Does nothing for "cuda".

    Returns a report for each patch, even if it was not needed. Raises `EngineError` if a patch had no effect.
    """
    if device != "cpu":
        return []
    reports = [_stand_in(name) for name in STAND_INS]
    # The order matters: sglang reads the engine flag on first import, and `_cuda_synchronize` imports torch.
    reports += [_cpu_engine_flag(), _cuda_synchronize(), latents_in_every_pass(), masks_on_a_cpu()]
    reports += [
        attention_of_a_batch(),
        experts_on_the_host(),
        norms_of_all_heads(),
        names_of_kernels(),
        pairs_without_pinned_memory(),
    ]
    for report in reports:
        if report.applied and not report.took_effect:
            raise EngineError(
                f"the CPU patch {report.name!r} ({report.symptom}) had no effect: {report.upstream} or torch has "
                "changed; install the pinned versions or update slime.compat.sglang_cpu"
            )
    return reports


def _stand_in(name: str) -> PatchReport:
    needed = not is_importable(name)
    if needed and not any(isinstance(f, StandInFinder) and f.covers(name) for f in sys.meta_path):
        # Normally, the stand-in's finder goes last. If a package exists but cannot be imported, the regular finders
        # would still find it, so the stand-in's finder goes first.
        broken = importlib.util.find_spec(name) is not None
        finder = StandInFinder(name)
        sys.meta_path.insert(0, finder) if broken else sys.meta_path.append(finder)
    took_effect = needed and getattr(importlib.import_module(name), "__slime_stand_in__", False)
    return PatchReport(
        name=f"stand-in:{name}",
        symptom=f"ModuleNotFoundError: No module named '{name}' while SGLang is imported",
        upstream=SGLANG,
        removal=f"SGLang imports {name} only where it is used, or a CPU build of {name} is available from PyPI",
        applied=needed,
        took_effect=took_effect,
    )


def _cpu_engine_flag() -> PatchReport:
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    common = sys.modules.get("sglang.srt.utils.common")
    return PatchReport(
        name="env:SGLANG_USE_CPU_ENGINE",
        symptom="SGLang looks for an accelerator despite --device cpu and finds no platform",
        upstream=SGLANG,
        removal="--device cpu alone selects the CPU platform",
        applied=True,
        took_effect=common is None or bool(common.is_cpu()),
    )


def _cuda_synchronize() -> PatchReport:
    import torch

    needed = not torch.cuda.is_available()
    if needed and not getattr(torch.cuda.synchronize, "__slime_stand_in__", False):

        def synchronize(device: object = None) -> None:
            """Does nothing, because a CPU has no kernel queue."""

        synchronize.__slime_stand_in__ = True  # type: ignore[attr-defined]
        torch.cuda.synchronize = synchronize
    took_effect = False
    if needed:
        try:
            torch.cuda.synchronize()
            took_effect = True
        except (AssertionError, RuntimeError):
            pass
    return PatchReport(
        name="torch.cuda.synchronize",
        symptom="/weights_checker: AssertionError: Torch not compiled with CUDA enabled",
        upstream=SGLANG,
        removal="sglang/srt/utils/weight_checker.py synchronises through its device module",
        applied=needed,
        took_effect=took_effect,
    )
