"""Law 7 with several ranks: killed and resumed equals not stopping, bit for bit, sharded optimizer state included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Ranks
from tests.support.tiny import write_tiny_model
from tests.support.training import MUON
from tests.support.training_ranks import run_layouts

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2": ("qwen3", {}),
    "tp2": ("qwen3", {"tensor_model_parallel_size": 2}),
    "vp2": ("qwen3", {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "ep2": ("qwen3_moe", {"expert_model_parallel_size": 2}),
    "dp2 by muon": ("qwen3", MUON),
    "tp2 by muon": ("qwen3", {**MUON, "tensor_model_parallel_size": 2}),
    "ep2 by muon": ("qwen3_moe", {**MUON, "expert_model_parallel_size": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_resumed_ranks_end_with_the_same_files(name: str, tmp_path: Path, ranks: Ranks) -> None:
    family, megatron = LAYOUTS[name]
    checkpoint = write_tiny_model(tmp_path / "model", family, tied=True, num_hidden_layers=4)
    defaults = {"checkpoint": str(checkpoint), "world_size": 2, "megatron": megatron, "save_end": True}
    whole_run = {"whole": {"rounds": 3, "save_after": 2}}
    whole = run_layouts(ranks, tmp_path / "first", whole_run, defaults=defaults)["whole"]
    folder = tmp_path / "first" / "whole"
    resumed_run = {"resumed": {"rounds": 1, "load": str(folder / "after_2")}}
    resumed = run_layouts(ranks, tmp_path / "second", resumed_run, defaults=defaults)["resumed"]
    assert resumed.result["metrics"] == whole.result["metrics"][2:]
    files = sorted((folder / "end").glob("rank_*"))
    assert len(files) == 4, "two ranks with two files each"
    for file in files:
        assert file.read_bytes() == (tmp_path / "second" / "resumed" / "end" / file.name).read_bytes(), file.name
