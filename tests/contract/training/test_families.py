"""Every family is what transformers says it is: log-probs, gradients and files, in every layout.

The reference is transformers' own class. Rows are packed, of samples of unequal lengths, in float32; files must come
back bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.families import FAMILIES, WITH_EXPERTS, reference, write_family
from tests.support.marks import quick
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

DENSE: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "sp2": (2, SP),
    "pp2": (2, PP),
    "tp2": (2, TP),
    "tp2pp2": (4, {**SP, **PP}),
    "cp2": (2, CP),
}
"""Name -> (ranks, Megatron's settings)."""
EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "sp2ep2": (2, {**SP, **EP, **ALL_TO_ALL}),
    "pp2": (2, PP),
    "sp2": (2, SP),
    "ep2": (2, EP),
    "pp2ep2": (4, {**PP, **EP, **ALL_TO_ALL}),
    "cp2": (2, CP),
}
SPLIT = {"cp2_a2a": (2, {**CP, "cp_comm_type": "a2a"}), "sp2cp2": (4, {**SP, **CP})}
"""For a family with a value of another size than the key, one with sinks and windows, and a plain one."""
QUICK = ("deepseek_v3", "sp2ep2")
"""With everything that there is to split; the others are slow."""


def layouts_of(family: str) -> dict[str, tuple[int, dict[str, Any]]]:
    """The layouts in which a family is tried."""
    layouts = EXPERTS if family in WITH_EXPERTS else DENSE
    return layouts | SPLIT if family in ("deepseek_v3", "gpt_oss", "glm4") else layouts


class Runs:
    """Families under layouts, each run when it is first asked for, and what transformers says."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self._ranks, self._models, self._folder = ranks, folder, folder / "runs"
        self._references: dict[str, tuple[list[Any], dict[str, Any]]] = {}
        self._checkpoints: dict[str, Path] = {}

    def _outcome(self, family: str, name: str) -> Outcome:
        if family not in self._checkpoints:
            self._checkpoints[family] = write_family(self._models / "models" / family, family)
            batch, scratch = random_batch(seed=BATCH_SEED), self._models / "gradients" / family
            self._references[family] = reference(self._checkpoints[family], batch, scratch)
        world_size, megatron = layouts_of(family)[name]
        layout = {
            "world_size": world_size,
            "megatron": megatron,
            "checkpoint": str(self._checkpoints[family]),
            "scenarios": {"loss": {}},
            "args": {"loss_type": "sft_loss", "calculate_per_token_loss": True, "micro_batch_size": 3},
            "seed": BATCH_SEED,
            "provoke": False,
            "export": True,
        }
        return run_layouts(self._ranks, self._folder, {f"{family}-{name}": layout}, defaults={})[f"{family}-{name}"]

    def check(self, family: str, name: str) -> None:
        """Compares one layout with the reference."""
        outcome, (log_probs, gradients) = self._outcome(family, name), self._references[family]
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
        source = _files(self._checkpoints[family])
        written = _files(self._folder / f"{family}-{name}" / "hf")
        assert source.keys() == written.keys()
        for tensor, want in source.items():
            assert want.dtype == written[tensor].dtype and torch.equal(want, written[tensor]), tensor


def _files(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


@pytest.fixture(scope="module")
def runs(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(ranks, tmp_path_factory.mktemp("families"))


CASES = [(family, name) for family in FAMILIES for name in layouts_of(family)]


@pytest.mark.parametrize(("family", "name"), quick(CASES, QUICK))
def test_a_family_is_that_of_transformers(runs: Runs, family: str, name: str) -> None:
    runs.check(family, name)
