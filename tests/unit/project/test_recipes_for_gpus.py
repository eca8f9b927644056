"""The recipes for GPUs: scripts are accepted, have places on the hosts that they name, and fit as the docs say."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from slime.cluster.placement import EngineDemand, Host, PlacementPlan, plan_placement
from slime.core.errors import ConfigError
from slime.models import table_for
from slime.settings import Args, parse_args
from slime.settings.command_line import explain_args as explain
from slime.settings.topology_yaml import topology_of
from slime.training.state.sleeping import EngineBytes, predicted_peaks
from tests.support.marks import quick
from tests.support.published import SYNCED
from tests.support.recipes import (
    DP_SWITCHES,
    RECIPES,
    SMALL,
    SPLITS,
    Recipe,
    TrainingLayout,
    cut,
    engine_of,
    engine_weights,
    rank_bytes,
    table_of,
)

DOC = Path(__file__).parents[3] / "docs" / "recipes.md"
MEASURED = Path(__file__).parents[3] / "benchmarks" / "results" / "colocated_starts_h200.json"
PLACES = {
    "qwen3_4b": (1, [(0, 1), (2, 3), (4, 5), (6, 7)]),
    "qwen3_30b_a3b": (1, [tuple(range(8))]),
    "glm_4_7": (8, [tuple(range(0, 32)), tuple(range(32, 64))]),
    "deepseek_r1": (16, [tuple(range(first, first + 16)) for first in range(0, 128, 16)]),
}
"""Hosts of 8 GPUs, and the slots of each engine."""
OF_THE_COPY = {"device", "megatron.bf16", "rollout_num_gpus"}
"""Settings that a tiny copy has besides."""


def parsed(recipe: Recipe, folder: Path) -> Args:
    """The settings of the recipe's own command line on GPUs, strictly."""
    words = recipe.words(folder)
    (folder / "model" / "config.json").write_text(json.dumps(recipe.config))
    return parse_args([*words, "--strict", "--device", "cuda"])


def plan_of(args: Args, num_hosts: int) -> PlacementPlan:
    """Where its processes are, on hosts of eight GPUs."""
    return plan_placement(
        num_nodes=args.actor_num_nodes,
        num_per_node=args.actor_num_gpus_per_node,
        engines=[EngineDemand(one.num_gpus, one.runs) for one in topology_of(args).wanted()],
        colocate=args.colocate,
        hosts=[Host(f"h{i}", f"10.0.0.{i}", 8, 64) for i in range(num_hosts)],
    )


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_accepted_as_it_stands_and_fills_the_hosts_that_it_names(name: str, tmp_path: Path) -> None:
    """Law: nothing in it is refused or without effect, and its processes have places on so many GPUs and no fewer."""
    args = parsed(RECIPES[name], tmp_path)
    num_hosts, engines = PLACES[name]
    plan = plan_of(args, num_hosts)
    assert plan.train_slots == tuple(range(8 * num_hosts)), "training has all GPUs"
    assert [engine.slots for engine in plan.engines] == engines
    with pytest.raises(ConfigError):
        plan_of(args, num_hosts - 1)
    layout = TrainingLayout.of(args)
    assert layout.world % (layout.tp * layout.pp * layout.cp) == 0 == layout.world % (layout.ep * layout.pp)
    assert "Set, loaded and derived:" in explain(args)


@pytest.mark.parametrize("name", RECIPES)
def test_the_tiny_copy_of_a_recipe_differs_in_sizes_layout_host_and_grader_alone(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    words = recipe.words(tmp_path)
    plain = {key: value for key, value in recipe.config.items() if key != "quantization_config"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(plain))
    whole, tiny = given(parse_args([*words, "--device", "cuda"])), given(parse_args(cut(recipe, words)))
    differs = {key for key in whole | tiny if whole.get(key) != tiny.get(key)}
    small = {*SMALL, *DP_SWITCHES, *(f"--{kind}-parallel-size" for kind in SPLITS), "--sequence-parallel"}
    names = {flag.removeprefix("--").replace("-", "_") for flag in (*small, "--num-layers-in-last-pipeline-stage")}
    assert {key.removeprefix("sglang.").removeprefix("megatron.") for key in differs - OF_THE_COPY} <= {
        name.removeprefix("sglang_") for name in names
    }
    split = f"megatron.{recipe.split.replace('-', '_')}_parallel_size"
    assert whole[split] > 1 and tiny[split] == 2, "ranks divide what they divide on GPUs, too"


def given(args: Args) -> dict[str, Any]:
    """What the command line says, by the names of settings, those of Megatron and SGLang behind a dot."""
    owners = {"megatron": args.megatron, "sglang": args.sglang}
    names = [name for name, origin in args.origins.items() if origin == "command line"]
    parts = [(name, *name.rpartition(".")[::2]) for name in names]
    return {
        name: owners[owner][key] if owner else args.components.get(key, getattr(args, key, None))
        for name, owner, key in parts
    }


@pytest.mark.parametrize(("shape", "run"), [("Qwen3-4B", 1), ("six layers of Qwen3-30B-A3B", 0)])
def test_the_arithmetic_gives_what_runs_on_a_gpu_predicted(shape: str, run: int) -> None:
    """Law: weights of a rank, and with them the peak of a weight sync, are those that the trainer itself works out."""
    config = RECIPES["qwen3_4b"].config if run else {**SYNCED["Qwen3-30B-A3B"][0], "num_hidden_layers": 6}
    rank, _ = rank_bytes(table_for(config), TrainingLayout(1, 1, 1, 1, 1, None), optimizer_on_host=False)
    peaks = predicted_peaks(rank, EngineBytes(rank.weights, None), bucket_bytes=512 << 20)
    recorded = json.loads(MEASURED.read_text())["runs"][run]["metrics"][2]
    assert peaks["sync"].trainer == recorded["perf/memory_sync_predicted_bytes"], shape


def row_of(recipe: Recipe, args: Args) -> str:
    """The row of the docs' table of memory, in GB of 10^9 bytes."""
    layout = TrainingLayout.of(args)
    on_host = bool(args.megatron["optimizer_cpu_offload"])
    rank, host = rank_bytes(table_of(recipe), layout, optimizer_on_host=on_host)
    quantised = "quantization_config" in recipe.config
    engine = engine_weights(table_of(recipe), engine_of(args), linear_bytes=1 if quantised else 2)
    peaks = predicted_peaks(rank, EngineBytes(engine, None), bucket_bytes=args.update_weight_buffer_size)
    train = peaks["train"].trainer
    sync = peaks["sync"].trainer + engine
    per_host = args.actor_num_gpus_per_node * (host + rank.weights + rank.others)
    checkpoint = 14 * sum(sizes_of(recipe)) / 1e9
    numbers = (rank.weights, rank.gradients, rank.others, train, engine, sync)
    cells = [*(f"{n / 1e9:.1f}" for n in numbers), f"{per_host / 1e9:.0f}", f"{checkpoint:,.0f}"]
    return f"| `{recipe.name}` | " + " | ".join(cells) + " |"


def sizes_of(recipe: Recipe) -> list[int]:
    """Entries of all parameters."""
    return [math.prod(shape) for entry in table_of(recipe).entries for shape in entry.row.shapes]


@pytest.mark.parametrize("name", quick(RECIPES, next(iter(RECIPES))))
def test_the_docs_say_what_a_recipe_takes(name: str, tmp_path: Path) -> None:
    """Law: the table of memory in the docs is what the arithmetic of a start gives for the recipe as it is."""
    row = row_of(RECIPES[name], parsed(RECIPES[name], tmp_path))
    assert row in DOC.read_text().splitlines(), f"docs/recipes.md wants the row\n{row}"


def test_the_docs_name_every_recipe_for_gpus() -> None:
    text = DOC.read_text()
    assert [name for name in RECIPES if f"recipes/{name}/run.sh" not in text] == []
    assert set(re.findall(r"recipes/(\w+)/run\.sh", text)) >= RECIPES.keys()
