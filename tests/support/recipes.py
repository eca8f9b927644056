"""The recipes for GPUs: the command line that each script starts, its model, what its ranks hold, and its tiny copy."""

from __future__ import annotations

import math
import os
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.core.hf_config import text_config
from slime.core.topology import EngineLayout
from slime.models import table_for
from slime.models.common.table import EMBEDDING, Entry, FamilyTable
from slime.settings import Args
from slime.settings.topology_yaml import layout_of
from slime.weights.holding import holdings
from tests.support.launch_scripts import facts
from tests.support.published import SYNCED

if TYPE_CHECKING:
    from slime.training.state.sleeping import RankBytes

ROOT = Path(__file__).parents[2]
ROWS = 256
"""Of prompts, as many as the largest batch asks for."""
PLAIN_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12
"""Of a parameter in bfloat16, of its gradient, and of its float32 master weight and moments."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One script for GPUs."""

    name: str
    config: Mapping[str, Any]
    """The published config.json of its model."""
    family: str
    """Of `tests.support.families`, for its tiny copy."""
    shape: Mapping[str, Any]
    """Of the tiny copy, beyond that of the family."""
    split: str
    """What two ranks of a CPU divide of the tiny copy: one of the `SPLITS` of the script."""

    @property
    def script(self) -> Path:
        """Its file."""
        return ROOT / "recipes" / self.name / "run.sh"

    def environment(self, folder: Path) -> dict[str, str]:
        """What the script asks for, below `folder`, and where it writes."""
        return {
            "MODEL": str(folder / "model"),
            "PROMPTS": str(folder / "prompts.jsonl"),
            "HELD_OUT": str(folder / "held_out.jsonl"),
            "SAVE": str(folder / "checkpoints"),
            "RUN_DIR": str(folder / "run"),
            "RAY_ADDRESS": "10.0.0.1:6379",
        }

    def words(self, folder: Path) -> list[str]:
        """The flags of the loop that the script starts, on files that this writes below `folder`."""
        (folder / "model").mkdir()
        write_prompts(folder)
        python, seen = folder / "python", folder / "words"
        python.write_text(f"#!/usr/bin/env bash\nprintf '%s\\n' \"$@\" > '{seen}'\n")
        python.chmod(0o700)
        environment = {**os.environ, **self.environment(folder), "PY": str(python)}
        subprocess.run(["bash", self.script], env=environment, cwd=folder, check=True, timeout=60)
        module, package, command, *words = seen.read_text().splitlines()
        assert (module, package, command) == ("-m", "slime", "train")
        return words


def write_prompts(folder: Path) -> None:
    """The prompts of training and evaluation."""
    for name in ("prompts", "held_out"):
        (folder / f"{name}.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n' * ROWS)


_MODELS = facts()["models"]
RECIPES = {
    one.name: one
    for one in (
        Recipe("qwen3_4b", _MODELS["Qwen3-4B"], "qwen3", {"tie_word_embeddings": True}, "tensor-model"),
        Recipe("qwen3_30b_a3b", SYNCED["Qwen3-30B-A3B"][0], "qwen3_moe", {"mlp_only_layers": []}, "expert-model"),
        Recipe("glm_4_7", _MODELS["GLM-4.7-355B-A32B"], "glm4_moe", {}, "pipeline-model"),
        Recipe("deepseek_r1", SYNCED["DeepSeek-V3"][0], "deepseek_v3", {}, "context"),
    )
}
"""By name. DeepSeek-R1 has the config.json of DeepSeek-V3."""


SPLITS = ("tensor-model", "pipeline-model", "context", "expert-model")
"""Kinds of parallelism."""
SMALL = {
    "--num-rollout": "1",
    "--rollout-batch-size": "4",
    "--n-samples-per-prompt": "4",
    "--over-sampling-batch-size": "6",
    "--global-batch-size": "8",
    "--num-steps-per-rollout": "2",
    "--max-tokens-per-gpu": "256",
    "--rollout-max-prompt-len": "64",
    "--rollout-max-response-len": "16",
    "--rollout-stop-token-ids": "1",
    "--n-samples-per-eval-prompt": "1",
    "--eval-max-response-len": "8",
    "--actor-num-nodes": "1",
    "--actor-num-gpus-per-node": "2",
    "--rollout-num-gpus-per-engine": "1",
    "--sglang-mem-fraction-static": "none",
    "--sglang-ep-size": "1",
    "--sglang-dp-size": "1",
    "--sglang-moe-dense-tp-size": "none",
    "--ray-address": "local",
    "--rm-type": "random",
}
"""Flag -> its value in a tiny copy. A random model answers no question, so that another grader has to tell answers
apart."""
ON_A_CPU = ("--device", "cpu", "--no-bf16", "--rollout-num-gpus", "1")
DP_SWITCHES = ("--sglang-enable-dp-attention", "--sglang-enable-dp-lm-head")
"""Switches of SGLang, which it has no opposite of."""


def cut(recipe: Recipe, words: list[str]) -> list[str]:
    """The command line of a recipe for one step of a tiny model of its family, on two cores.

    What changes is sizes, how ranks and engines divide the model, the host, the number format, and the grader. All else
    acts as it stands in the script.
    """
    values = {**SMALL, **{f"--{kind}-parallel-size": "2" if kind == recipe.split else "1" for kind in SPLITS}}
    if recipe.split != "pipeline-model":
        values["--decoder-last-pipeline-num-layers"] = "none"
    changed = [word for flag, value in values.items() if flag in words for word in (flag, value)]
    alone = [] if recipe.split == "tensor-model" else ["--no-sequence-parallel"]
    return [*(word for word in words if word not in DP_SWITCHES), *changed, *alone, *ON_A_CPU]


@dataclass(frozen=True, slots=True)
class TrainingLayout:
    """How training ranks divide a model."""

    world: int
    tp: int
    pp: int
    cp: int
    ep: int
    last_layers: int | None
    """Layers of the last pipeline stage, where it has others than the rest."""

    @classmethod
    def of(cls, args: Args) -> TrainingLayout:
        """Of a run."""
        m, world = args.megatron, args.actor_num_nodes * args.actor_num_gpus_per_node
        names = ("tensor", "pipeline", "expert")
        tp, pp, ep = (m[f"{name}_model_parallel_size"] or 1 for name in names)
        return cls(world, tp, pp, m["context_parallel_size"] or 1, ep, m["num_layers_in_last_pipeline_stage"])

    def stage_of(self, entry: Entry, table: FamilyTable) -> int:
        """The pipeline stage that has a parameter."""
        if entry.layer is None:
            return 0 if entry.megatron == EMBEDDING else self.pp - 1
        last = self.last_layers or table.sizes.num_layers // self.pp
        each = (table.sizes.num_layers - last) // max(self.pp - 1, 1)
        return min(entry.layer // each, self.pp - 1) if each else 0


def rank_bytes(table: FamilyTable, layout: TrainingLayout, *, optimizer_on_host: bool) -> tuple[RankBytes, float]:
    """What the training rank with most weights keeps on its GPU, in bfloat16, and in host memory for the optimizer.

    Optimizer states are divided by the ranks that hold the same parameters.
    """
    from slime.training.state.sleeping import RankBytes  # imports Megatron

    plain: dict[int, float] = defaultdict(float)
    experts: dict[int, float] = defaultdict(float)
    wide: dict[int, float] = defaultdict(float)
    for entry in table.entries:
        parts = 1 if entry.row.dim is None or entry.expert is not None else layout.tp
        stage, size = layout.stage_of(entry, table), sum(map(math.prod, entry.row.shapes)) / parts
        if not entry.row.trained:
            wide[stage] += size * (4 if entry.row.wide else PLAIN_BYTES)
        elif entry.expert is not None:
            experts[stage] += size / layout.ep
        else:
            plain[stage] += size
    stage = max(range(layout.pp), key=lambda s: plain[s] + experts[s])
    trained = plain[stage] + experts[stage]
    same = plain[stage] * layout.tp * layout.pp + experts[stage] * layout.ep * layout.pp
    optimizer = OPTIMIZER_BYTES * same / layout.world
    weights = PLAIN_BYTES * trained + wide[stage]
    others = 0.0 if optimizer_on_host else optimizer
    return RankBytes(round(weights), round(GRADIENT_BYTES * trained), round(others)), optimizer - others


def engine_weights(table: FamilyTable, layout: EngineLayout, *, linear_bytes: int = 2) -> int:
    """Bytes of the weights of the engine rank with most; `linear_bytes`: of an entry of a quantised weight."""
    held: dict[Any, float] = defaultdict(float)
    for entries in table.resident.values():
        for rank, _, holding in holdings(table, entries, layout):
            own = holding.entries(entries)
            size = sum(math.prod(shape) for entry in own for shape in entry.row.shapes) / holding.share.parts
            row = entries[0].row
            linear = row.dim is not None and row.megatron not in (EMBEDDING, "output_layer.weight")
            held[rank] += size * (4 if row.wide else linear_bytes if linear else 2)
    return round(max(held.values()))


def table_of(recipe: Recipe) -> FamilyTable:
    """The weights of the published model."""
    return table_for(text_config(recipe.config))


def engine_of(args: Args) -> EngineLayout:
    """The layout of the engines of a run."""
    return layout_of(args.rollout_num_gpus_per_engine, args.sglang)
