"""Every family is what transformers says it is: log-probs, gradients and files, in every layout.

The reference is transformers' own class. Rows are packed, of samples of unequal lengths, in float32; files must come
back bit for bit. One set of processes works through all families and layouts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.families import FAMILIES, WITH_EXPERTS, reference, write_family
from tests.support.ranks import Ranks
from tests.support.training import random_batch
from tests.support.training_ranks import Outcome, run_layouts

TOLERANCE = 1e-4
TP = {"tensor_model_parallel_size": 2}
SP = {**TP, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
ALL_TO_ALL = {"moe_token_dispatcher_type": "alltoall"}
BATCH_SEED = 3

WITHOUT_CONTEXT_PARALLEL = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "glm_moe_dsa")
"""Their delta nets want whole sequences; the sparse indexer takes short ones only, and these are longer."""

Layouts = dict[str, tuple[int, dict[str, Any]]]
QUICK: Layouts = {"one": (1, {}), "sp2": (2, SP), "pp2": (2, PP)}
QUICK_EXPERTS: Layouts = {"one": (1, {}), "sp2ep2": (2, {**SP, **EP, **ALL_TO_ALL}), "pp2": (2, PP)}
SLOW: Layouts = {"tp2": (2, TP), "tp2pp2": (4, {**SP, **PP})}
SLOW_EXPERTS: Layouts = {"sp2": (2, SP), "ep2": (2, {**EP}), "pp2ep2": (4, {**PP, **EP, **ALL_TO_ALL})}


def layouts_of(family: str, *, slow: bool) -> Layouts:
    """Name -> (ranks, Megatron's settings)."""
    kinds = (QUICK_EXPERTS, SLOW_EXPERTS) if family in WITH_EXPERTS else (QUICK, SLOW)
    if slow and family not in WITHOUT_CONTEXT_PARALLEL:
        return {**kinds[1], "cp2": (2, CP)}
    return kinds[slow]


def selected(request: pytest.FixtureRequest) -> list[str]:
    """The families that this session tests: `-k glm4` runs no others."""
    named = {item.callspec.params.get("family") for item in request.session.items if hasattr(item, "callspec")}
    return [family for family in FAMILIES if family in named]


class Runs:
    """All families in the layouts of one kind, and what transformers says."""

    def __init__(self, folder: Path, request: pytest.FixtureRequest, *, slow: bool) -> None:
        ranks: Ranks = request.getfixturevalue("ranks")
        batch = random_batch(seed=BATCH_SEED)
        self.references: dict[str, tuple[list[Any], dict[str, Any]]] = {}
        self.checkpoints: dict[str, Path] = {}
        specs: dict[str, dict[str, Any]] = {}
        for family in selected(request):
            self.checkpoints[family] = write_family(folder / "models" / family, family)
            self.references[family] = reference(self.checkpoints[family], batch, folder / "gradients" / family)
            for name, (world_size, megatron) in layouts_of(family, slow=slow).items():
                specs[f"{family}-{name}"] = {
                    "world_size": world_size,
                    "megatron": megatron,
                    "checkpoint": str(self.checkpoints[family]),
                }
        defaults = {
            "scenarios": {"loss": {}},
            "args": {"loss_type": "sft_loss", "calculate_per_token_loss": True, "micro_batch_size": 3},
            "seed": BATCH_SEED,
            "provoke": False,
            "export": True,
        }
        self.folder = folder / "runs"
        self.outcomes: dict[str, Outcome] = run_layouts(ranks, self.folder, specs, defaults=defaults)

    def check(self, family: str, name: str) -> None:
        """Compares one layout with the reference."""
        outcome, (log_probs, gradients) = self.outcomes[f"{family}-{name}"], self.references[family]
        for got, want in zip(outcome.result["log_probs"], log_probs, strict=True):
            assert np.abs(np.asarray(got) - want).max() < TOLERANCE
        own = outcome.gradients["loss"]
        absent = [n for n, g in gradients.items() if n not in own and g.abs().max() > 0]
        assert not absent and not set(own) - set(gradients), f"{absent} {set(own) - set(gradients)}"
        largest = max(float(g.abs().max()) for g in gradients.values())
        for tensor, got in own.items():
            want = gradients[tensor]
            # Relative to the tensor's largest entry; what is a millionth of the largest gradient is rounding.
            error = float((got - want).abs().max() / want.abs().max().clamp_min(1e-4 * largest))
            assert error < TOLERANCE, f"{tensor}: {error}"
        source = _files(self.checkpoints[family])
        written = _files(self.folder / f"{family}-{name}" / "hf")
        assert source.keys() == written.keys()
        for tensor, want in source.items():
            assert want.dtype == written[tensor].dtype and torch.equal(want, written[tensor]), tensor


def _files(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


@pytest.fixture(scope="module")
def quick(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("families"), request, slow=False)


@pytest.fixture(scope="module")
def slow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("families_slow"), request, slow=True)


CASES = [(family, name) for family in FAMILIES for name in layouts_of(family, slow=False)]
SLOW_CASES = [(family, name) for family in FAMILIES for name in layouts_of(family, slow=True)]


@pytest.mark.parametrize("family, name", CASES)
def test_a_family_is_that_of_transformers(quick: Runs, family: str, name: str) -> None:
    quick.check(family, name)


@pytest.mark.slow
@pytest.mark.parametrize("family, name", SLOW_CASES)
def test_a_family_is_that_of_transformers_in_more_layouts(slow: Runs, family: str, name: str) -> None:
    slow.check(family, name)
