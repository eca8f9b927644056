"""`slime certify` on a CPU: trainer and engine agree bit for bit, a run repeats, and planted faults are found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.families import write_family

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
FLAGS = [
    "--device",
    "cpu",
    "--steps",
    "3",
    "--no-bf16",
    "--rollout-max-response-len",
    "24",
    "--rollout-temperature",
    "0.8",
]
FAULTS = '''
import time
import torch
from slime.ops import linear, swiglu


def another_kernel(args):
    """The activation in float64, rounded at the end, in the trainer alone."""
    plain = swiglu.reference
    swiglu.reference = lambda mixed: plain(mixed.double()).to(mixed.dtype)


def atomic_sums(args):
    """Products are added to the weight gradient with an order of rows that depends on the clock."""
    def add(total, grad, inputs):
        order = torch.randperm(len(grad), generator=torch.Generator().manual_seed(time.monotonic_ns() % 2**31))
        total += linear.product(grad[order].t(), inputs[order])

    import megatron.core.tensor_parallel.layers as layers
    backward = layers.LinearWithGradAccumulationAndAsyncCommunication.backward

    def shuffled(ctx, above):
        found = list(backward(ctx, above))
        inputs, _weight = ctx.saved_tensors
        rows, grads = inputs.flatten(0, -2), above.flatten(0, -2)
        if found[1] is not None:
            found[1] = torch.zeros_like(found[1])
            add(found[1], grads, rows)
        return tuple(found)

    layers.LinearWithGradAccumulationAndAsyncCommunication.backward = staticmethod(shuffled)


def atomic_norms(args):
    """The weight gradient of norms alone, whose last bits change no metric that is logged without a digest."""
    from slime.ops import norm

    plain = norm.reference

    class Shuffled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, rows):
            ctx.rows = rows
            return weight.expand(rows, -1)

        @staticmethod
        def backward(ctx, above):
            order = torch.randperm(ctx.rows, generator=torch.Generator().manual_seed(time.monotonic_ns() % 2**31))
            return above[order].sum(0), None

    def shuffled(x, weight, eps, *more, **named):
        return plain(x, Shuffled.apply(weight, x.numel() // x.shape[-1]).view(*x.shape[:-1], -1), eps, *more, **named)

    norm.reference = shuffled
'''


def certified(folder: Path, checkpoint: Path, *more: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", "slime", "certify", "--hf-checkpoint", str(checkpoint), *FLAGS, *more]
    done = subprocess.run(
        [*command, "--json", str(folder / "certificate.json")], capture_output=True, text=True, check=False
    )
    assert (folder / "certificate.json").exists(), done.stdout[-2000:] + done.stderr[-4000:]
    return done.returncode, json.loads((folder / "certificate.json").read_text()), done.stdout


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_every_log_prob_is_equal_and_a_run_repeats(family: str, tmp_path: Path) -> None:
    experts = family == "qwen3_moe"
    checkpoint = write_family(tmp_path / "model", family, **({"mlp_only_layers": []} if experts else {}))
    code, found, text = certified(tmp_path, checkpoint, *(["--use-rollout-routing-replay"] if experts else []))
    assert found["exact"]["mismatch_max"] == 0.0 and found["exact"]["num_tokens"] > 1000
    assert found["plain"]["mismatch_max"] > 0.0, "without the flag, kernels differ"
    assert found["repeats"] and code == 0 and "bitwise equal" in text


@pytest.mark.parametrize("fault", ["another_kernel", "atomic_sums", "atomic_norms"])
def test_a_fault_is_found(fault: str, tmp_path: Path) -> None:
    (tmp_path / "faults.py").write_text(FAULTS)
    checkpoint = write_family(tmp_path / "model", "qwen3")
    code, found, text = certified(
        tmp_path, checkpoint, "--custom-megatron-init-path", f"{tmp_path / 'faults.py'}:{fault}"
    )
    assert code == 1
    if fault == "another_kernel":
        assert found["exact"]["mismatch_max"] > 0.0 and found["repeats"]
    else:
        assert not found["repeats"] and "NOT equal" in text and found["exact"]["mismatch_max"] == 0.0
