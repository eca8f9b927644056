"""Law 2 for a family that SGLang does not serve on a CPU: its own model class and loader make the table's tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.core.layout import EngineLayout
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
    with Ranks(fresh=True) as ranks:
        told = ranks.run(compare, size, EngineLayout(tp_size=size), checkpoint)
    for rank, (found,) in enumerate(told):
        assert len(found.pop("equal")) > 30, "too few tensors were compared"
        assert not any(found.values()), f"rank {rank} of {size}: {found}"
