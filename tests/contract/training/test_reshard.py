"""A checkpoint belongs to the model, not to the layout: what one layout saved, any other resumes.

The next step after a resume has the loss, the gradient norm and the learning rate of the run that went on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.families import FAMILIES, write_family
from tests.support.ranks import Ranks
from tests.support.tiny import write_tiny_model
from tests.support.training_ranks import Outcome, run_layouts

SEQUENCE = {"sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "vp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2},
    "sp2": {"tensor_model_parallel_size": 2, **SEQUENCE},
    "sp2ep2": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, **SEQUENCE},
}
CLOSE = {"abs": 1e-6, "rel": 1e-5}


def resumed(
    ranks: Ranks, folder: Path, model: Path, source: str, targets: list[str], **args: Any
) -> dict[str, Outcome]:
    """Two steps under `source`, saved in between; then the second one under each of `targets`, from there."""
    # Against the engine's log-probs the ratio is not one, so that the loss says something.
    defaults = {
        "checkpoint": str(model),
        "world_size": 2,
        "provoke": False,
        "args": {"use_rollout_logprobs": True, **args},
    }
    layouts = {source: {"megatron": LAYOUTS[source], "rounds": 2, "save_after": 1}}
    for target in targets:
        load = str(folder / source / "after_1")
        layouts[f"to_{target}"] = {"megatron": LAYOUTS[target], "rounds": 1, "load": load}
    return run_layouts(ranks, folder, layouts, defaults=defaults)


def assert_same_step(outcomes: dict[str, Outcome], source: str) -> None:
    """Each resumed run makes the step that `source` made."""
    want = outcomes[source].result["metrics"][1]
    assert outcomes[source].result["metrics"][0]["train/loss"] != pytest.approx(want["train/loss"], rel=1e-3)
    for name, outcome in outcomes.items():
        if name != source:
            (got,) = outcome.result["metrics"]
            for metric in ("train/loss", "train/grad_norm", "train/lr-pg_0"):
                assert got[metric] == pytest.approx(want[metric], **CLOSE), f"{name}: {metric}"
            for tensor, value in outcomes[source].weights.items():
                assert outcome.weights[tensor].sub(value).abs().max() < 2e-5, f"{name}: {tensor}"


@pytest.mark.slow
def test_tensor_parallel_to_data_parallel(tmp_path: Path, ranks: Ranks) -> None:
    """Law: saved under TP 2 x DP 1, resumed under TP 1 x DP 2 and under TP 2 again."""
    model = write_tiny_model(tmp_path / "model", "qwen3", tied=False)
    outcomes = resumed(ranks, tmp_path / "run", model, "tp2", ["tp2", "dp2"])
    assert_same_step(outcomes, "tp2")
    assert outcomes["to_tp2"].result["metrics"] == outcomes["tp2"].result["metrics"][1:], "the same layout: the bits"


@pytest.mark.slow
@pytest.mark.parametrize("source", ["dp2", "vp2", "cp2"])
def test_any_layout_to_any_other(source: str, tmp_path: Path, ranks: Ranks) -> None:
    """Law: with a tied embedding, which the last pipeline stage has a copy of; layers on other stages."""
    model = write_tiny_model(tmp_path / "model", "qwen3", tied=True, num_hidden_layers=4)
    outcomes = resumed(ranks, tmp_path / "run", model, source, ["tp2", "pp2", "vp2", "dp2", source])
    assert_same_step(outcomes, source)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["ep2", "sp2", "pp2"])
def test_experts_move(source: str, tmp_path: Path, ranks: Ranks) -> None:
    """Law: experts on other ranks, whole there whatever the tensor-parallel size."""
    model = write_tiny_model(tmp_path / "model", "qwen3_moe", tied=False)
    outcomes = resumed(ranks, tmp_path / "run", model, source, ["ep2", "sp2", "sp2ep2", "pp2", "dp2"])
    assert_same_step(outcomes, source)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"lora_rank": 4}, {"advantage_estimator": "ppo"}], ids=["adapters", "critic"])
def test_what_the_table_does_not_know(settings: dict[str, Any], tmp_path: Path, ranks: Ranks) -> None:
    """Law: adapters are cut as what they adapt, and a critic has its own folder, head and optimizer."""
    model = write_tiny_model(tmp_path / "model", "qwen3", tied=True)
    if "advantage_estimator" in settings:
        settings = {**settings, "critic_load": str(model), "critic_lr": 1e-3}
    outcomes = resumed(ranks, tmp_path / "run", model, "tp2", ["dp2", "pp2"], **settings)
    assert_same_step(outcomes, "tp2")


@pytest.mark.slow
def test_ranks_that_trained_nothing(tmp_path: Path, ranks: Ranks) -> None:
    """Law: steps are counted where something is trained, and ranks that have it after a resume know them."""
    model = write_tiny_model(tmp_path / "model", "qwen3", tied=False, num_hidden_layers=4)
    only = (r"layers\.[23]\.",)  # of the last stage
    outcomes = resumed(ranks, tmp_path / "run", model, "pp2", ["pp2", "dp2"], only_train_params_name_list=only)
    assert_same_step(outcomes, "pp2")


@pytest.mark.slow
def test_every_kind_of_row(tmp_path: Path, ranks: Ranks) -> None:
    """Law: for every family: fused and interleaved rows, stacked experts, buffers, rows that stay float32."""
    layouts: dict[str, dict[str, Any]] = {}
    for family in FAMILIES:
        model = str(write_family(tmp_path / "models" / family, family))
        first = {"checkpoint": model, "megatron": LAYOUTS["sp2"], "rounds": 2, "save_after": 1}
        layouts[family] = first
        for target in ("sp2", "dp2", "pp2"):
            load = str(tmp_path / "run" / family / "after_1")
            megatron = LAYOUTS[target]
            layouts[f"{family}-{target}"] = {"checkpoint": model, "megatron": megatron, "rounds": 1, "load": load}
    defaults = {"world_size": 2, "provoke": False, "args": {"use_rollout_logprobs": True}}
    outcomes = run_layouts(ranks, tmp_path / "run", layouts, defaults=defaults)
    for family in FAMILIES:
        assert_same_step({n: o for n, o in outcomes.items() if n == family or n.startswith(family + "-")}, family)
        assert outcomes[f"{family}-sp2"].result["metrics"] == outcomes[family].result["metrics"][1:], family
