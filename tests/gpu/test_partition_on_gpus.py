"""Law 3 over NCCL: two GPUs, every kind of parallelism, float32 gradients and bf16 log-probs against one GPU.

python -m pytest tests/gpu
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.families import write_family
from tests.support.ranks import Ranks
from tests.support.tiny import write_tiny_model
from tests.support.training_ranks import Outcome, run_layouts

pytestmark = pytest.mark.two_gpus

SIZES: dict[str, dict[str, Any]] = {
    "one": {},
    "dp2": {"overlap_grad_reduce": True},
    "tp2": {"tensor_model_parallel_size": 2},
    "sp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "vp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"},
}
SCENARIOS: dict[str, dict[str, Any]] = {
    "single": {"args": {"micro_batch_size": 1}},
    "four": {"args": {"micro_batch_size": 4}},
    "gspo": {"args": {"policy_loss": "gspo", "micro_batch_size": 3}},
}


def _run(root: Path, family: str, names: tuple[str, ...], **megatron: Any) -> dict[str, Outcome]:
    # Heads of 64, as the kernels of a GPU want them.
    write, own = (write_family, {}) if family == "qwen3_next" else (write_tiny_model, {"tied": False})
    checkpoint = write(root / "model", family, num_hidden_layers=4, head_dim=64, **own)
    defaults = {
        "checkpoint": str(checkpoint),
        "scenarios": SCENARIOS,
        "rounds": 2,
        "args": {"device": "cuda", "log_probs_chunk_size": 64},
    }
    layouts = {
        name: {"world_size": 1 if name == "one" else 2, "megatron": {**SIZES[name], **megatron}} for name in names
    }
    with Ranks(fresh=True) as ranks:
        return run_layouts(ranks, root / "out", layouts, defaults=defaults)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("qwen3", ("one", "dp2", "tp2", "sp2", "pp2", "vp2", "cp2")),
        ("qwen3_moe", ("one", "dp2", "sp2", "ep2", "cp2")),
        ("qwen3_next", ("one", "sp2", "cp2")),
    ],
)
def test_gradients_do_not_feel_the_partition(tmp_path: Path, family: str, names: tuple[str, ...]) -> None:
    outcomes = _run(tmp_path, family, names)
    for layout, scenario in ((a, b) for a in names for b in SCENARIOS):
        want, got = outcomes["one"].gradients[scenario], outcomes[layout].gradients[scenario]
        for name, tensor in want.items():
            error = float((got[name] - tensor).abs().max() / tensor.abs().max().clamp_min(1e-12))
            assert error <= 1e-4, f"{layout}/{scenario}: {name} differs by {error:.2e} of its largest entry"
    for layout in names:
        for want_metrics, metrics in zip(
            outcomes["one"].result["metrics"], outcomes[layout].result["metrics"], strict=True
        ):
            assert metrics["train/grad_norm"] == pytest.approx(want_metrics["train/grad_norm"], rel=1e-3), layout


def test_bf16_log_probs_do_not_feel_the_partition(tmp_path: Path) -> None:
    """The attention kernel for packed rows, with and without context parallelism."""
    names = ("one", "dp2", "sp2", "pp2", "cp2")
    outcomes = _run(tmp_path, "qwen3", names, bf16=True)
    want = np.concatenate(outcomes["one"].result["log_probs"])
    for layout in names:
        error = np.abs(np.concatenate(outcomes[layout].result["log_probs"]) - want)
        assert error.mean() < 0.01 and error.max() < 0.1, f"{layout}: mean {error.mean():.4f}, worst {error.max():.4f}"
