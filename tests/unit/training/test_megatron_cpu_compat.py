"""The CPU patches of megatron-core: explicit, idempotent, confined to megatron's own modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

PROBE = """
import sys
from slime.compat.megatron_cpu import activate
assert "torch" not in sys.modules and "megatron" not in sys.modules, "importing the patches imports nothing heavy"
assert activate("cuda") == [] and "megatron" not in sys.modules, "no effect for a GPU"

import torch
before = {name: vars(torch.cuda).get(name) for name in ("current_device", "Stream", "manual_seed", "get_rng_state")}
kind, move = torch.Tensor.type, torch.Tensor.cuda
first = activate("cpu")
names = [report.name for report in first]
assert names and all(r.symptom and r.upstream and r.removal for r in first)
from megatron.core.optimizer import clip_grads, optimizer
from megatron.core.tensor_parallel import random
patched = (clip_grads.torch, optimizer.clip_grad_by_total_norm_fp32, random._get_cuda_rng_state)
assert [r.name for r in activate("cpu")] == names
again = (clip_grads.torch, optimizer.clip_grad_by_total_norm_fp32, random._get_cuda_rng_state)
assert all(a is b for a, b in zip(patched, again)), "a second call changes nothing"

assert {name: vars(torch.cuda).get(name) for name in before} == before, "torch itself is untouched"
assert torch.Tensor.type is kind and torch.Tensor.cuda is move
assert torch.zeros(1).type() == "torch.FloatTensor"
assert clip_grads.torch is not torch and clip_grads.torch.Tensor is torch.Tensor
assert clip_grads.torch.ones(2, device="cuda").device.type == "cpu"
try:
    torch.zeros(1, device="cuda")
except (AssertionError, RuntimeError):
    pass
from slime.core.errors import EngineError
try:
    activate("cuda")
except EngineError as error:
    assert "another process" in str(error)
    print("ok")
"""


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="states what a machine without a GPU does")
@pytest.mark.slow
def test_patches_are_explicit_idempotent_and_confined() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROBE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "ok"
