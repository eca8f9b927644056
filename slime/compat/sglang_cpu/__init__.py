"""What stock SGLang 0.5.16 needs on a machine without a GPU.

`activate(device)` is called once per server process by `slime.serving.launch`, before SGLang is imported; nothing
happens on import and nothing happens on a GPU machine (`device == "cuda"`) or where the real module can be imported.

Invariants
1. A stand-in never hides a module that can be imported.
2. A stand-in never computes: reaching one of its kernels raises and names the kernel.
3. Each patch is looked at after it was applied; one that did not take effect raises `EngineError`.
4. `activate` may be called again; the second call changes nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

from slime.compat.patch_report import PatchReport
from slime.compat.sglang_cpu.patches import (
    experts_on_the_host,
    latents_in_every_pass,
    masks_on_a_cpu,
    names_of_kernels,
    norms_of_all_heads,
)
from slime.compat.sglang_cpu.stand_ins import STAND_INS, StandInFinder
from slime.core.errors import EngineError

UPSTREAM = "sglang 0.5.16"

__all__ = ["UPSTREAM", "PatchReport", "activate", "is_importable"]


def is_importable(name: str) -> bool:
    """Whether the real module `name` exists and imports: a wheel for another CPU or torch does not count."""
    module = sys.modules.get(name)
    if module is not None:
        return not getattr(module, "__slime_stand_in__", False)
    if any(isinstance(finder, StandInFinder) and finder.covers(name) for finder in sys.meta_path):
        return False
    try:
        if importlib.util.find_spec(name) is None:
            return False
        importlib.import_module(name)
    except Exception:  # an extension built for another machine raises ImportError, OSError, RuntimeError, ...
        for loaded in [m for m in sys.modules if m == name or m.startswith(name + ".")]:
            del sys.modules[loaded]
        return False
    return True


def activate(device: str) -> list[PatchReport]:
    """Makes stock SGLang importable and usable on a CPU, in this process only.

    `device`: "cpu" or "cuda"; on "cuda" nothing is touched and the list is empty. Returns one report per patch, those
    that were not needed included. Raises `EngineError` if a patch did not take effect.
    """
    if device != "cpu":
        return []
    reports = [_stand_in(name) for name in STAND_INS]
    # Order: the engine flag is read when sglang is first imported, and `cuda_synchronize` imports torch.
    reports += [_cpu_engine_flag(), _cuda_synchronize(), latents_in_every_pass(UPSTREAM), masks_on_a_cpu(UPSTREAM)]
    reports += [experts_on_the_host(UPSTREAM), norms_of_all_heads(UPSTREAM), names_of_kernels(UPSTREAM)]
    for report in reports:
        if report.applied and not report.took_effect:
            raise EngineError(
                f"got no effect from the CPU patch {report.name!r} ({report.symptom}), because {report.upstream} or "
                "torch changed; install the pinned versions or update slime.compat.sglang_cpu"
            )
    return reports


def _stand_in(name: str) -> PatchReport:
    needed = not is_importable(name)
    if needed and not any(isinstance(f, StandInFinder) and f.covers(name) for f in sys.meta_path):
        # Last in line: whatever the ordinary finders know comes first. A package that exists but cannot be imported
        # would be found by them, so in that case the stand-in has to go first.
        broken = importlib.util.find_spec(name) is not None
        finder = StandInFinder(name)
        sys.meta_path.insert(0, finder) if broken else sys.meta_path.append(finder)
    took_effect = needed and getattr(importlib.import_module(name), "__slime_stand_in__", False)
    return PatchReport(
        name=f"stand-in:{name}",
        symptom=f"ModuleNotFoundError: No module named '{name}' while SGLang is imported",
        upstream=UPSTREAM,
        removal=f"SGLang imports {name} only where it is used, or {name} has a CPU build on the package index",
        applied=needed,
        took_effect=took_effect,
    )


def _cpu_engine_flag() -> PatchReport:
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    common = sys.modules.get("sglang.srt.utils.common")
    return PatchReport(
        name="env:SGLANG_USE_CPU_ENGINE",
        symptom="SGLang looks for an accelerator and finds no platform, --device cpu notwithstanding",
        upstream=UPSTREAM,
        removal="--device cpu alone selects the CPU platform",
        applied=True,
        took_effect=common is None or bool(common.is_cpu()),
    )


def _cuda_synchronize() -> PatchReport:
    import torch

    needed = not torch.cuda.is_available()
    if needed and not getattr(torch.cuda.synchronize, "__slime_stand_in__", False):

        def synchronize(device: object = None) -> None:
            """There is no queue to wait for on a CPU."""

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
        upstream=UPSTREAM,
        removal="sglang/srt/utils/weight_checker.py synchronises through its device module",
        applied=needed,
        took_effect=took_effect,
    )
