"""With `--deterministic-mode`, two trainers that get the same batches are bitwise equal: losses, gradient norms and
weights after ten steps. Responses are long enough for kernels to split a sequence among blocks.

python -m pytest tests/gpu/test_determinism_on_gpu.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.conftest import Figure
from tests.support.families import write_family
from tests.support.ranks import Ranks
from tests.support.training_ranks import Outcome, run_layouts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
STEPS = 10
MATRIX = {"hidden_size": 256, "head_dim": 64, "max_position_embeddings": 2048}
"""As large as kernels need to split a sum."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "one GPU": {},
    "TP 2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "EP 2": {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"},
}


def trained(root: Path, checkpoint: Path, layout: str, *, deterministic: bool) -> Outcome:
    """Ten steps of ranks of their own."""
    settings = {**LAYOUTS[layout], "bf16": True, "lr": 1e-3, "deterministic_mode": deterministic}
    ranks_of = {"run": {"world_size": 1 if layout == "one GPU" else 2, "megatron": settings}}
    defaults = {
        "checkpoint": str(checkpoint),
        "args": {"device": "cuda", "micro_batch_size": 4},
        "lengths": (300, 900),
        "rounds": STEPS,
        "provoke": False,
    }
    with Ranks(fresh=True) as ranks:
        return run_layouts(ranks, root, ranks_of, defaults=defaults)["run"]


def numbers_that_differ(a: Outcome, b: Outcome) -> list[str]:
    """Names of the weights, and of the metrics with their step, that are not bitwise equal."""
    names = [name for name, tensor in a.weights.items() if not torch.equal(tensor, b.weights[name])]
    for step, (one, other) in enumerate(zip(a.result["metrics"], b.result["metrics"], strict=True)):
        names += [
            f"{name} of step {step}: {value!r} and {other[name]!r}"
            for name, value in one.items()
            if name.startswith("train/")
            and value != other[name]
            and not (value != value and other[name] != other[name])
        ]
    if a.result["log_probs"] != b.result["log_probs"]:
        names.append("log-probs before training")
    return names


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", "one GPU"),
        ("qwen3_moe", "one GPU"),
        ("qwen3_next", "one GPU"),
        ("deepseek_v3", "one GPU"),
        pytest.param("qwen3", "TP 2", marks=pytest.mark.two_gpus),
        pytest.param("qwen3_moe", "EP 2", marks=pytest.mark.two_gpus),
    ],
)
def test_two_trainers_are_equal_to_the_bit(tmp_path: Path, family: str, layout: str, figure: Figure) -> None:
    own = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 48}
    checkpoint = write_family(tmp_path / "model", family, **{**MATRIX, **(own if family == "deepseek_v3" else {})})
    first, second = (trained(tmp_path / name, checkpoint, layout, deterministic=True) for name in ("a", "b"))
    norms = [metrics["train/grad_norm"] for metrics in first.result["metrics"]]
    assert all(norm > 0 for norm in norms) and len(set(norms)) == STEPS, norms
    figure("last gradient norm", norms[-1])
    assert not (differing := numbers_that_differ(first, second)), differing[:10]
