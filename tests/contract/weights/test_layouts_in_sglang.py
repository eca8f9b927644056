"""Law 2 for engines of every layout: SGLang's own models and loaders make, rank by rank, what is expected of them.

Ranks in processes of their own, without a server: on a CPU SGLang loads all of these and serves few.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.core.hf_config import read_hf_config
from slime.core.topology import EngineLayout
from slime.models import layout_problem
from tests.contract.weights.sglang_residents import compare
from tests.support.families import write_family
from tests.support.ranks import Ranks

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {"mlp_only_layers": []},  # SGLang makes experts in all layers
    "glm4": {},
    "glm4_moe": {},
    "deepseek_v3": {},
    "kimi_k2": {},
    "minimax_m2": {},
    "gpt_oss": {},
    "glm4_moe_lite": {},
    "qwen3_next": {},
}
"""Family -> config beyond that of `tests.support.families`."""
LAYOUTS = {
    "EP 2": EngineLayout(tp_size=2, ep_size=2),
    "DP attention": EngineLayout(tp_size=2, dp_size=2),
    "DP attention, all of it": EngineLayout(tp_size=2, dp_size=2, ep_size=2, dp_lm_head=True, whole_dense_mlp=True),
    "PP 2": EngineLayout(pp_size=2),
    "uneven PP 2": EngineLayout(pp_size=2, stage_layers=(1, 3)),
    "TP 2 in PP 2": EngineLayout(tp_size=2, pp_size=2, ep_size=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_rank_holds_what_is_expected_of_it(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS[name]
    if layout.stage_layers:
        monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", ",".join(map(str, layout.stage_layers)))
    folders = {}
    for family, own in FAMILIES.items():
        folder = write_family(tmp_path / family, family, **own)
        config = folder / "config.json"  # SGLang's Qwen3-Next keeps one norm in the dtype of the file, not of the flag
        config.write_text(config.read_text().replace('"float32"', '"bfloat16"'))
        if layout_problem(read_hf_config(str(folder)), layout) is None:
            folders[family] = folder
    assert folders, "no family has this layout"
    with Ranks(fresh=True) as ranks:
        told = ranks.run(compare, layout.num_ranks, layout, *folders.values())
    wrong = []
    for rank, by_family in zip(layout.ranks(), told, strict=True):
        for family, found in zip(folders, by_family, strict=True):
            assert len(found.pop("equal")) > 6, f"{family}: too few tensors were compared"
            wrong += [f"{family}, rank {rank}: {found}"] if any(found.values()) else []
    assert not wrong, "\n".join(wrong)
