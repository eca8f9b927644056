"""The recipes for GPUs, cut to a tiny model on two cores, go through a whole step, from prompts to a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.observability.sinks import read_jsonl
from tests.e2e.test_loops import MAX_MISMATCH
from tests.support.e2e import latest_step, started_and_finished
from tests.support.families import write_family
from tests.support.recipes import RECIPES, cut

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_samples_trains_syncs_evaluates_and_saves_a_tiny_model_of_its_family(
    name: str, tmp_path: Path
) -> None:
    """The command that the script starts, made small by `cut`: a real engine, two training ranks, a checkpoint."""
    recipe = RECIPES[name]
    words = cut(recipe, recipe.words(tmp_path))
    write_family(tmp_path / "model", recipe.family, max_position_embeddings=1024, **recipe.shape)
    run = started_and_finished(tmp_path / "run", [*words])
    (step,) = run.metrics("train").values()
    assert step["train/train_rollout_logprob_abs_diff_max"] <= MAX_MISMATCH, step
    assert step["train/grad_norm"] > 0, "something was learnt from"
    assert latest_step(tmp_path / "checkpoints") == 0
    seen = {name for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") for name in row}
    assert {"eval/held_out", "perf/update_weights_time"} <= seen, "it was evaluated, and engines got the new weights"
    assert run.left() == []
