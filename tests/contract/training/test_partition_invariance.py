"""Law 3: the gradient does not depend on the partition. Real Megatron, real gloo, one process per rank."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.tiny import write_tiny_model
from tests.support.training import free_port

TOLERANCE = 1e-5
"""Relative to the largest entry of each tensor, float32."""

ROOT = Path(__file__).parents[3]
REVERSED = list(reversed(range(8)))
SHUFFLED = [5, 2, 7, 0, 3, 6, 1, 4]
SCENARIOS: dict[str, dict[str, Any]] = {
    "pairs": {},
    "single": {"args": {"micro_batch_size": 1}},
    "all_in_one": {"args": {"micro_batch_size": 8}},
    "by_tokens": {"args": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 30}},
    "balanced": {"args": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 30, "balance_data": True}},
    "reversed": {"order": REVERSED, "args": {"micro_batch_size": 3}},
    "shuffled": {"order": SHUFFLED},
    "chunks": {"args": {"log_probs_chunk_size": 3, "micro_batch_size": 8}},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"world_size": 1, "megatron": {}},
    "dp2": {"world_size": 2, "megatron": {"overlap_grad_reduce": True}},
    "tp2": {"world_size": 2, "megatron": {"tensor_model_parallel_size": 2}},
    "sp2": {"world_size": 2, "megatron": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
}


@dataclass(frozen=True)
class Outcome:
    """What the ranks of one layout wrote."""

    gradients: dict[str, dict[str, Any]]
    weights: dict[str, Any]
    result: dict[str, Any]


def _start(folder: Path, checkpoint: Path, layout: dict[str, Any]) -> list[subprocess.Popen[bytes]]:
    folder.mkdir(parents=True)
    spec = {
        **layout,
        "checkpoint": str(checkpoint),
        "port": free_port(),
        "out": str(folder),
        "scenarios": SCENARIOS,
        "rounds": 2,
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.training_worker", str(folder / "spec.json")]
    processes = []
    for rank in range(layout["world_size"]):
        with (folder / f"rank_{rank}.log").open("wb") as log:
            processes.append(subprocess.Popen([*command, str(rank)], cwd=ROOT, stdout=log, stderr=log))
    return processes


def _wait(folder: Path, processes: list[subprocess.Popen[bytes]]) -> Outcome:
    try:
        codes = [p.wait(timeout=200) for p in processes]
    finally:
        for p in processes:
            p.kill()
    logs = "\n".join(f.read_text()[-3000:] for f in sorted(folder.glob("*.log")))
    assert not any(codes), f"exit codes {codes}\n{logs}"
    return Outcome(
        gradients={name: load_file(folder / f"{name}.safetensors") for name in SCENARIOS},
        weights=load_file(folder / "weights.safetensors"),
        result=json.loads((folder / "result.json").read_text()),
    )


@pytest.fixture(scope="module", params=["qwen3", pytest.param("llama", marks=pytest.mark.slow)])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Every layout on one model, two layouts at a time."""
    root = tmp_path_factory.mktemp(f"partition_{request.param}")
    # A vocabulary that two ranks do not divide: the padded row must not matter.
    checkpoint = write_tiny_model(root / "model", request.param, tied=request.param == "qwen3", vocab_size=131)
    out = {}
    for pair in (("one", "dp2"), ("tp2", "sp2")):
        running = {name: _start(root / name, checkpoint, LAYOUTS[name]) for name in pair}
        out.update({name: _wait(root / name, processes) for name, processes in running.items()})
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_is_the_same_for_every_partition(outcomes: dict[str, Outcome], layout: str) -> None:
    reference = outcomes["one"].gradients["single"]
    assert max(float(g.abs().max()) for g in reference.values()) > 1e-2, "a gradient of zero proves nothing"
    for scenario, gradients in outcomes[layout].gradients.items():
        assert gradients.keys() == reference.keys()
        for name, want in reference.items():
            error = float((gradients[name] - want).abs().max() / want.abs().max().clamp_min(1e-12))
            assert error <= TOLERANCE, f"{layout}/{scenario}: {name} differs by {error:.2e} of its largest entry"


@pytest.mark.parametrize("layout", ["dp2", "tp2", "sp2"])
def test_training_is_the_same_for_every_partition(outcomes: dict[str, Outcome], layout: str) -> None:
    one, other = outcomes["one"], outcomes[layout]
    for want, got in zip(one.result["metrics"], other.result["metrics"], strict=True):
        assert got.keys() == want.keys()
        for name in ("train/loss", "train/grad_norm", "train/entropy_loss", "train/train_rollout_logprob_abs_diff"):
            assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-6), name
    for name, want in one.weights.items():
        # Adam divides by the gradient's own size, so rounding of a tiny gradient can show; lr is 1e-3.
        assert float((other.weights[name] - want).abs().max()) < 1e-4, name


def test_log_probs_are_the_same_for_every_partition(outcomes: dict[str, Outcome]) -> None:
    for layout in ("dp2", "tp2", "sp2"):
        for want, got in zip(outcomes["one"].result["log_probs"], outcomes[layout].result["log_probs"], strict=True):
            assert got == pytest.approx(want, abs=1e-5), layout
