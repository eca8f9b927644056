"""Law 2 for a family that SGLang does not serve on a CPU: its own model class and loader make the table's tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.core.hf_config import read_hf_config
from slime.core.topology import EngineLayout
from slime.models import layout_problem
from tests.contract.weights.sglang_residents import compare
from tests.support.qwen_next import write_qwen_next
from tests.support.ranks import Ranks


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_sglang_holds_what_the_table_says(tmp_path: Path, family: str, size: int) -> None:
    checkpoint = write_qwen_next(tmp_path / family, family, tied=family == "qwen3_5")
    config = checkpoint / "config.json"  # SGLang's Qwen3-Next keeps one norm in the dtype of the file, not of the flag
    config.write_text(config.read_text().replace('"float32"', '"bfloat16"'))
    _require_equal(checkpoint, EngineLayout(tp_size=size))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_5", EngineLayout(tp_size=4, dp_size=2)),
        ("qwen3_5_moe", EngineLayout(tp_size=4, dp_size=2)),
        ("qwen3_5_moe", EngineLayout(tp_size=2, dp_size=2, ep_size=2, dp_lm_head=True, whole_dense_mlp=True)),
    ],
)
def test_with_dp_attention_the_embedding_is_whole(tmp_path: Path, family: str, layout: EngineLayout) -> None:
    checkpoint = write_qwen_next(tmp_path / family, family, tied=family == "qwen3_5")
    assert layout_problem(read_hf_config(str(checkpoint)), layout) is None
    _require_equal(checkpoint, layout)


def _require_equal(checkpoint: Path, layout: EngineLayout) -> None:
    with Ranks(fresh=True) as ranks:
        told = ranks.run(compare, layout.num_ranks, layout, checkpoint)
    for rank, (found,) in enumerate(told):
        assert len(found.pop("equal")) > 30, "too few tensors were compared"
        assert not any(found.values()), f"rank {rank} of {layout}: {found}"
