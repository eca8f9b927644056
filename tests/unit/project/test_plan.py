"""`slime plan`: it predicts what recorded runs measured, its rates are those of the records, and it refuses what
does not fit."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rates
from benchmarks.rates import RESULTS, Run, all_runs, direct, job, predicted, read
from benchmarks.training.shapes import SHAPES
from slime.cli.main import main
from slime.cli.plan import problems, proposals
from slime.core.topology import EngineLayout, ParallelSizes
from slime.training import costs
from slime.training.costs import RATES

RUNS = all_runs()
FAR_OFF = {"30b-a3b-2l certified, 1 GPU", "30b-a3b-2l certified, 2 GPUs", "0.6b certified, 1 GPU"}
"""Runs beside tests on the same host, whose generation or training takes longer than predicted: see the docs."""
LAYOUTS = {"one": {}, "tp2": {"tp": 2}, "cp2": {"cp": 2}, "pp2": {"pp": 2}, "ep2": {"ep": 2}}


def ids(runs: list[Run]) -> list[str]:
    return [run.name for run in runs]


MEASURED = [run for run in RUNS if run.memory_gb is not None]


@pytest.mark.parametrize("run", MEASURED, ids=ids(MEASURED))
def test_predicted_peaks_are_those_of_measured_runs(run: Run) -> None:
    """Law: on one GPU and on two, with and without recomputation, the predicted allocation is the measured one."""
    assert run.memory_gb is not None, run.name
    assert predicted(run, "memory_gb") == pytest.approx(run.memory_gb, rel=0.03)


def test_the_long_samples_are_among_the_measured_peaks() -> None:
    (found,) = [run for run in MEASURED if run.source == "colocated_4b_16k_h200.json"]
    recorded = statistics.median(
        row["perf/memory_train_predicted_bytes"] for row in rows_of(found.source, "memory_train")
    )
    assert predicted(found, "memory_gb") == pytest.approx(recorded / 1e9, rel=0.03), "the rehearsal's own prediction"
    assert len(MEASURED) >= 15 and len({run.source for run in MEASURED}) >= 5


def rows_of(source: str, key: str) -> list[dict[str, float]]:
    return [row for row in read(source)["metrics"] if f"perf/{key}_bytes" in row]


TRAINED = [run for run in RUNS if run.train_s is not None and run.name not in FAR_OFF]


@pytest.mark.parametrize("run", TRAINED, ids=ids(TRAINED))
def test_predicted_training_takes_as_long_as_measured(run: Run) -> None:
    assert run.train_s is not None, run.name
    assert predicted(run, "train_s") == pytest.approx(run.train_s, rel=0.15)


GENERATED = [run for run in RUNS if run.generate_s is not None and run.name not in FAR_OFF]


@pytest.mark.parametrize("run", GENERATED, ids=ids(GENERATED))
def test_predicted_generation_takes_as_long_as_measured(run: Run) -> None:
    assert run.generate_s is not None, run.name
    assert predicted(run, "generate_s") == pytest.approx(run.generate_s, rel=0.15)


def recorded_parameters() -> list[tuple[str, str, int]]:
    found = {(r["shape"], r["layout"], r["parameters_of_rank"]) for r in read("train_two_gpus_h200.json")["records"]}
    return sorted(found)


@pytest.mark.parametrize(("shape", "layout", "parameters"), recorded_parameters())
def test_a_rank_holds_the_parameters_that_the_trainer_counted(shape: str, layout: str, parameters: int) -> None:
    assert costs.stage_parameters(job(shape, LAYOUTS[layout], 2), 0).trained == parameters


def test_a_weight_sync_needs_what_the_trainer_predicts() -> None:
    recorded = read("colocated_starts_h200.json")["runs"][3]["metrics"][2]["perf/memory_sync_predicted_bytes"]
    found = job("4b")
    assert costs.sync_memory(found, 0) - costs.engine_weight_bytes(found) == recorded


def test_stages_and_experts_add_up_to_the_model() -> None:
    whole = costs.stage_parameters(job("30b-a3b-6l"), 0)
    stages = [costs.stage_parameters(job("30b-a3b-6l", {"pp": 3, "ep": 4}, 12), stage) for stage in range(3)]
    assert sum(one.dense for one in stages) == whole.dense
    assert 4 * sum(one.experts for one in stages) == whole.experts
    assert costs.stage_layers(94, 8) == (12,) * 7 + (10,) and costs.stage_layers(61, 4, last=13) == (16, 16, 16, 13)


def test_an_engine_holds_its_shards_and_cache() -> None:
    whole, split = job("30b-a3b-6l"), job("30b-a3b-6l", engine=EngineLayout(tp_size=4, ep_size=4))
    assert costs.engine_weight_bytes(whole) == read("sync_speed_h200.json")["runs"]["30b-a3b-6l"]["bytes"]
    assert costs.engine_weight_bytes(split) < 0.26 * costs.engine_weight_bytes(whole)
    assert costs.cache_bytes_per_token(whole) == 6 * 2 * 4 * 128 * 2 == 4 * costs.cache_bytes_per_token(split)


def test_rates_are_those_of_the_records() -> None:
    """Law: a rate that one measurement gives equals it, and every rate names its files."""
    for name, rate in direct().items():
        assert RATES[name].value == pytest.approx(rate.value, rel=1e-3), name
        assert RATES[name].source == rate.source, name
    known = {*rates.TRAIN_FIT, *rates.DECODE_FIT, *rates.EXCHANGE_FIT, *direct()}
    assert set(RATES) == known, "python -m benchmarks.rates --write derives all of them"
    for name, rate in RATES.items():
        files = [] if rate.source.startswith(("docs/", "not measured")) else rate.source.split(", ")
        assert all((RESULTS / file).is_file() for file in files), name


def test_waiting_and_recomputing_take_time_and_memory_where_they_should() -> None:
    few, many = (job("4b", {"pp": 4}, 4, num_samples=n, max_tokens=8192) for n in (64, 1024))

    def share(of: Any) -> float:
        parts = {part.name: part.seconds for part in costs.train_parts(of)}
        return parts["pipeline bubble"] / parts["computation"]

    assert share(few) > 4 * share(many), "the more micro-batches, the smaller the bubble"
    plain, again = job("4b"), job("4b", recompute=frozenset({"full"}))
    assert costs.training_memory(again, 0).total < costs.training_memory(plain, 0).total
    assert costs.train_seconds(again) > costs.train_seconds(plain)
    near, far = job("4b", world=8), job("4b", world=16)
    assert costs.update_seconds(far, 0)["DP"] > 4 * costs.update_seconds(near, 0)["DP"], "between hosts"
    alone, lends = (costs.fixed_memory(job("4b", colocated=colocated)).total for colocated in (False, True))
    assert alone - lends == 3 * job("4b").bucket_bytes > 0, "a trainer with a GPU of its own keeps its buckets"
    assert costs.check_sizes(job("4b", world=2).with_sizes(ParallelSizes(tp=3))) is not None


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that consists of its config.json."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["8b"]))
    return tmp_path


def test_a_run_that_does_not_fit_is_refused_with_layouts_that_do(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    words = ["plan", "--hf-checkpoint", str(model), "--gpus", "4", "--colocate", "--gpu", "h100"]
    assert main([*words, "--json", str(out)]) == 1
    printed = capsys.readouterr().out
    assert "does not fit: training does not fit: a rank needs" in printed
    assert "train_kernels_h200.json" in printed, "each number comes with its rate and source"
    planned = json.loads(out.read_text())
    assert planned["problems"] and planned["rates"]["link"]["source"] == "sync_speed_h200.json"
    assert 0 < planned["proposals"][0]["training_gb"] < 85
    assert "-parallel-size" in planned["proposals"][0]["flags"]


def test_what_is_proposed_fits() -> None:
    large = job("8b", world=8, gpu=costs.GPUS["h100"], num_engines=8)
    assert any("a rank needs" in problem for problem in problems(large))
    found = proposals(large)
    assert found and not any(problem for one in found for problem in problems(one))
    assert len({one.sizes for one in found}) == len(found) and all(one.world == 8 for one in found)
