"""The layer of multi-token prediction: its loss and gradients are those of transformers' layers, in every layout, and
the model's own are what they are without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.contract.training.test_families import ALL_TO_ALL, CP, EP, PP, SP
from tests.support.marks import quick
from tests.support.mtp import Reference, names_of, write_with_mtp
from tests.support.ranks import Ranks
from tests.support.training import random_batch
from tests.support.training_ranks import Outcome, run_layouts

TOLERANCE = 1e-4
BATCH_SEED = 3
FACTOR = 0.5
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "pp2": (2, PP),
    "sp2ep2": (2, {**SP, **EP, **ALL_TO_ALL}),
    "cp2": (2, CP),
    "pp2ep2": (4, {**PP, **EP, **ALL_TO_ALL}),
}
WITHOUT_EXPERTS = {"sp2": (2, SP)}
QUICK = ("deepseek_v3", "one")
CASES = [(family, name) for family in ("deepseek_v3", "qwen3_next") for name in LAYOUTS] + [
    ("glm4_moe", "one"),
    ("qwen3_5", "one"),
    *(("mimo", name) for name in ("one", "sp2", "pp2", "cp2")),
]


class Runs:
    """Families under layouts, each run when it is first asked for."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self._ranks, self.folder = ranks, folder
        self._outcomes: dict[str, Outcome] = {}
        self._references: dict[str, Any] = {}

    def checkpoint(self, family: str) -> Path:
        path = self.folder / "models" / family
        return path if path.exists() else write_with_mtp(path, family)

    def reference(self, family: str) -> Any:
        if family not in self._references:
            reference = Reference(self.checkpoint(family), family)
            scratch = self.folder / "gradients" / family
            self._references[family] = reference.gradients(random_batch(seed=BATCH_SEED), scratch)
        return self._references[family]

    def outcome(self, family: str, name: str, **more: Any) -> Outcome:
        key = f"{family}-{name}-{'-'.join(more)}"
        if key not in self._outcomes:
            world_size, megatron = {**LAYOUTS, **WITHOUT_EXPERTS}[name]
            layout = {
                "world_size": world_size,
                "megatron": {**megatron, "mtp_loss_scaling_factor": FACTOR},
                "checkpoint": str(self.checkpoint(family)),
                "scenarios": {"loss": {}},
                "args": {
                    "loss_type": "sft_loss",
                    "calculate_per_token_loss": True,
                    "micro_batch_size": 3,
                    "enable_mtp_training": True,
                },
                "seed": BATCH_SEED,
                "provoke": False,
                "export": True,
                **more,
            }
            self._outcomes[key] = run_layouts(self._ranks, self.folder / "runs", {key: layout}, defaults={})[key]
        return self._outcomes[key]

    def without(self, family: str) -> Outcome:
        args = {"loss_type": "sft_loss", "calculate_per_token_loss": True, "micro_batch_size": 3}
        return self.outcome(family, "one", args=args, megatron={})


@pytest.fixture(scope="module")
def runs(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(ranks, tmp_path_factory.mktemp("mtp"))


@pytest.mark.parametrize(("family", "name"), quick(CASES, QUICK))
def test_loss_and_gradients_are_those_of_transformers_layers(runs: Runs, family: str, name: str) -> None:
    outcome, (loss, gradients) = runs.outcome(family, name, rounds=1), runs.reference(family)
    assert abs(outcome.result["metrics"][0]["train/mtp_loss"] - loss) < TOLERANCE
    own = {n: g for n, g in outcome.gradients["loss"].items() if n in gradients}
    assert own.keys() == gradients.keys(), set(gradients) ^ set(own)
    largest = max(float(g.abs().max()) for g in gradients.values())
    for tensor, want in gradients.items():
        error = float((own[tensor] / FACTOR - want).abs().max() / want.abs().max().clamp_min(1e-4 * largest))
        assert error < TOLERANCE, f"{tensor}: {error}"


@pytest.mark.parametrize("family", quick(["deepseek_v3", "qwen3_next"], "deepseek_v3"))
def test_the_model_learns_as_it_does_without_it(runs: Runs, family: str) -> None:
    with_it, without = runs.outcome(family, "one", rounds=1), runs.without(family)
    assert with_it.result["log_probs"] == without.result["log_probs"]
    shared = without.gradients["loss"].keys()
    assert with_it.gradients["loss"].keys() > shared and not any(n.startswith("mtp.") for n in shared)
    for name in shared:
        assert torch.equal(with_it.gradients["loss"][name], without.gradients["loss"][name]), name


@pytest.mark.parametrize("family", quick(["deepseek_v3", "mimo", "qwen3_next"], "deepseek_v3"))
def test_an_export_has_the_trained_layer_and_true_copies(runs: Runs, family: str) -> None:
    outcome = runs.outcome(family, "one", rounds=1)
    source = _files(runs.checkpoint(family))
    key = f"{family}-one-rounds"
    written = _files(runs.folder / "runs" / key / "hf")
    assert written.keys() == source.keys()
    assert all(torch.equal(written[n], t) for n, t in source.items()), "loaded and written as it was"
    assert {n for n in outcome.weights if n.startswith(names_of(family)["layer"])}
    assert any(not torch.equal(outcome.weights[n], source[n]) for n in runs.reference(family)[1]), "a round trains it"


@pytest.mark.parametrize("family", quick(["deepseek_v3", "qwen3_next"], "deepseek_v3"))
def test_the_layer_can_be_trained_alone(runs: Runs, family: str) -> None:
    args = {
        "loss_type": "sft_loss",
        "calculate_per_token_loss": True,
        "micro_batch_size": 3,
        "enable_mtp_training": True,
        "only_train_params_name_list": ["mtp\\."],
    }
    outcome = runs.outcome(family, "one", args=args)
    assert outcome.gradients["loss"].keys() == runs.reference(family)[1].keys()


@pytest.mark.slow
def test_a_resumed_run_is_one_that_did_not_stop(runs: Runs) -> None:
    whole = runs.outcome("deepseek_v3", "one", rounds=2, save_after=1)
    saved = runs.folder / "runs" / "deepseek_v3-one-rounds-save_after" / "after_1"
    resumed = runs.outcome("deepseek_v3", "one", load=str(saved), rounds=1)
    assert resumed.result["metrics"][-1]["train/mtp_loss"] == whole.result["metrics"][-1]["train/mtp_loss"]
    for name, tensor in whole.weights.items():
        assert torch.equal(resumed.weights[name], tensor), name


def _files(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
