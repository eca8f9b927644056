"""Stand-ins are made only where a module is missing, never compute, and never touch a GPU machine.

Each case runs in an interpreter of its own, because activation changes the process.
"""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(code: str, **env: str) -> str:
    import os

    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_on_a_gpu_machine_nothing_is_touched() -> None:
    run(
        "import sys, os, slime; before = list(sys.meta_path), dict(os.environ)\n"
        "from slime.compat.sglang_cpu import activate\n"
        "assert activate('cuda') == []\n"
        "assert (list(sys.meta_path), dict(os.environ)) == before\n"
        "assert 'torch' not in sys.modules"
    )


@pytest.mark.slow
def test_a_module_that_can_be_imported_is_never_replaced(tmp_path: object) -> None:
    from pathlib import Path

    real = Path(str(tmp_path)) / "torchvision"
    real.mkdir()
    (real / "__init__.py").write_text("REAL = True\n")
    run(
        "import slime.compat.sglang_cpu as c\n"
        "r = {x.name: x for x in c.activate('cpu')}\n"
        "import torchvision\n"
        "assert torchvision.REAL and not r['stand-in:torchvision'].applied\n",
        PYTHONPATH=f"{tmp_path}:{':'.join(sys.path)}",
    )


def test_a_module_that_exists_and_cannot_be_imported_is_replaced(tmp_path: object) -> None:
    from pathlib import Path

    broken = Path(str(tmp_path)) / "torchvision"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')\n")
    run(
        "import slime.compat.sglang_cpu as c\n"
        "r = {x.name: x for x in c.activate('cpu')}\n"
        "from torchvision.transforms import InterpolationMode\n"
        "assert r['stand-in:torchvision'].took_effect and InterpolationMode.BICUBIC.value == 'bicubic'\n"
        "assert all(x.took_effect for x in c.activate('cpu') if x.applied), 'a second call changes nothing'\n",
        PYTHONPATH=f"{tmp_path}:{':'.join(sys.path)}",
    )


def test_reaching_a_kernel_of_a_stand_in_raises_and_names_it() -> None:
    run(
        "from slime.compat.sglang_cpu.stand_ins import StandInFinder\n"
        "import sys; sys.meta_path.insert(0, StandInFinder('sgl_kernel'))\n"
        "from sgl_kernel.flash_attn import flash_attn_varlen_func as f\n"
        "from slime.core.errors import EngineError\n"
        "try: f(1)\n"
        "except EngineError as e: assert 'sgl_kernel.flash_attn.flash_attn_varlen_func' in str(e)\n"
        "else: raise SystemExit('a kernel without a build computed something')\n"
    )
