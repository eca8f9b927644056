"""Starts the processes of `training_worker`, waits for them, and reads what they wrote."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """What the ranks of one layout wrote."""

    gradients: dict[str, dict[str, Any]]
    """Scenario -> HF name -> gradient."""
    weights: dict[str, Any]
    result: dict[str, Any]
    errors: dict[str, list[str]] = field(default_factory=dict)
    """Kind -> what the ranks were told; shorter than the world if one was not."""


def run_layouts(
    folder: Path, layouts: dict[str, dict[str, Any]], *, defaults: dict[str, Any], timeout_s: float = 560.0
) -> dict[str, Outcome]:
    """Runs every layout, one after the other, in one set of processes; `defaults` fill what a layout leaves out."""
    specs = {}
    for name, layout in layouts.items():
        (folder / name).mkdir(parents=True)
        specs[name] = {"scenarios": {}, **defaults, **layout, "out": str(folder / name)}
    (folder / "spec.json").write_text(json.dumps({"layouts": list(specs.values())}))
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.training_worker", str(folder / "spec.json")]
    processes = []
    for rank in range(max(spec["world_size"] for spec in specs.values())):
        with (folder / f"rank_{rank}.log").open("wb") as log:
            processes.append(subprocess.Popen([*command, str(rank)], cwd=ROOT, stdout=log, stderr=log))
    try:
        codes = _wait(processes, timeout_s)
    finally:
        for p in processes:
            p.kill()
    logs = "\n".join(f.read_text()[-3000:] for f in sorted(folder.glob("*.log")))
    assert not any(codes), f"exit codes {codes}\n{logs}"
    return {name: _read(folder / name, spec["scenarios"]) for name, spec in specs.items()}


def _wait(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> list[int | None]:
    """Exit codes; without those of ranks that would wait for one that has failed."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        codes = [p.poll() for p in processes]
        if all(code is not None for code in codes) or any(codes):
            return codes
        time.sleep(0.1)
    raise TimeoutError(f"got no end of the training ranks within {timeout_s} s; exit codes {codes}")


def _read(folder: Path, scenarios: dict[str, Any]) -> Outcome:
    told = [json.loads(file.read_text()) for file in sorted(folder.glob("errors_*.json"))]
    return Outcome(
        gradients={name: load_file(folder / f"{name}.safetensors") for name in scenarios},
        weights=load_file(folder / "weights.safetensors"),
        result=json.loads((folder / "result.json").read_text()),
        errors={kind: [errors[kind] for errors in told if kind in errors] for kind in ("non_finite", "gap", "hook")},
    )


def run_on_cpu_and_gpu(folder: Path, checkpoint: Path, devices: dict[str, dict[str, Any]]) -> dict[str, float]:
    """One rank for each of `devices` ("cpu" and "gpu" in float32, others as they like): how far each is
    from the CPU's log-probs on average. The GPU's float32 gradients must be within 1e-3 of the CPU's, relative to the
    largest entry, and its log-probs within 1e-4.
    """
    layouts = {name: {"world_size": 1, "megatron": {}, **own} for name, own in devices.items()}
    defaults = {"checkpoint": str(checkpoint), "scenarios": {"four": {}}, "rounds": 1, "provoke": False}
    outcomes: dict[str, Outcome] = {}
    for kind in ("cpu", "cuda"):  # in processes of their own: what helps Megatron on a CPU stays for a process's life
        own = {name: layout for name, layout in layouts.items() if layout["args"]["device"] == kind}
        outcomes |= run_layouts(folder / kind, own, defaults=defaults)
    for tensor, want in outcomes["cpu"].gradients["four"].items():
        error = float((outcomes["gpu"].gradients["four"][tensor] - want).abs().max() / want.abs().max().clamp_min(1e-6))
        assert error < 1e-3, f"gradient of {tensor} differs by {error:.1e} of its largest entry"
    log_probs = {name: np.concatenate(outcome.result["log_probs"]) for name, outcome in outcomes.items()}
    assert np.abs(log_probs["gpu"] - log_probs["cpu"]).max() < 1e-4, "float32 log-probs of GPU and CPU differ"
    return {name: float(np.abs(own - log_probs["cpu"]).mean()) for name, own in log_probs.items()}
