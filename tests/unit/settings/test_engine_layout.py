"""What the settings of an engine say of its layout, and what the layout says to SGLang."""

from __future__ import annotations

from typing import Any

import pytest

from slime.core.errors import ConfigError
from slime.core.topology import ONE_RANK, EngineLayout
from slime.settings.topology_yaml import STAGES_ENV, contradictions, layout_of, server_settings

LAYOUTS: list[tuple[int, dict[str, Any], EngineLayout]] = [
    (1, {}, ONE_RANK),
    (4, {}, EngineLayout(tp_size=4)),
    (4, {"pp_size": 2}, EngineLayout(tp_size=2, pp_size=2)),
    (4, {"ep_size": 2}, EngineLayout(tp_size=4, ep_size=2)),
    (4, {"dp_size": 2, "enable_dp_attention": True}, EngineLayout(tp_size=4, dp_size=2)),
    (
        8,
        {"dp_size": 2, "enable_dp_attention": True, "enable_dp_lm_head": True, "moe_dense_tp_size": 1, "pp_size": 2},
        EngineLayout(tp_size=4, pp_size=2, dp_size=2, dp_lm_head=True, whole_dense_mlp=True),
    ),
    (2, {"moe_dense_tp_size": 2}, EngineLayout(tp_size=2)),
]


@pytest.mark.parametrize(("num_gpus", "sglang", "layout"), LAYOUTS)
def test_a_layout_comes_back_from_the_settings_that_it_means(
    num_gpus: int, sglang: dict[str, Any], layout: EngineLayout
) -> None:
    assert layout_of(num_gpus, sglang) == layout and layout.num_ranks == num_gpus
    assert layout_of(num_gpus, server_settings(layout)) == layout
    assert contradictions(layout, sglang) == contradictions(layout, server_settings(layout)) == []
    other = EngineLayout(tp_size=3)
    assert contradictions(other, sglang) == sorted(
        name for name in sglang if not name.startswith("enable_dp") or other.dp_size > 1
    )


@pytest.mark.parametrize(
    ("num_gpus", "sglang", "words"),
    [
        (3, {"pp_size": 2}, "does not divide"),
        (2, {"dp_size": 2}, "--sglang-enable-dp-attention"),
        (2, {"ep_size": 3}, "ep_size 3"),
        (4, {"pp_size": 2, "dp_size": 4, "enable_dp_attention": True}, "dp_size 4"),
        (4, {"moe_dense_tp_size": 2}, "moe_dense_tp_size"),
    ],
)
def test_sizes_that_do_not_divide_each_other_are_refused(num_gpus: int, sglang: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        layout_of(num_gpus, sglang)


def test_the_layers_of_stages_come_from_where_sglang_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STAGES_ENV, "3,1")
    assert layout_of(2, {"pp_size": 2}).stage_layers == (3, 1)
    assert layout_of(2, {}).stage_layers == (), "without stages it means nothing"
    with pytest.raises(ConfigError, match="one number per stage"):
        layout_of(3, {"pp_size": 3})
    monkeypatch.setenv(STAGES_ENV, "many")
    with pytest.raises(ConfigError, match=STAGES_ENV):
        layout_of(2, {"pp_size": 2})
