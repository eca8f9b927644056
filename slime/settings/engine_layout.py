"""The layout of an engine as its settings say it, and the settings of SGLang that a layout means.

`--rollout-num-gpus-per-engine` counts all GPUs of an engine; `--sglang-pp-size` divides them into pipeline stages, each
with as many tensor-parallel ranks as the division leaves. SGLang's default of each setting is the layout without it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slime.core.errors import ConfigError
from slime.core.topology import EngineGroup, EngineLayout, ServedModel

if TYPE_CHECKING:
    from slime.settings.args import Args

STAGES_ENV = "SGLANG_PP_LAYER_PARTITION"
"""Where SGLang reads how many layers each pipeline stage has. A run's environment says it of the policy."""


def layout_of(num_gpus: int, sglang: Mapping[str, Any], *, trained: bool = True) -> EngineLayout:
    """The layout of an engine of `num_gpus`. `sglang`: ServerArgs by field name; `trained`: whether of the policy.

    Raises `ConfigError` for sizes that do not divide each other.
    """
    pp_size, dp_size = int(sglang.get("pp_size") or 1), int(sglang.get("dp_size") or 1)
    if num_gpus < 1 or pp_size < 1 or num_gpus % pp_size:
        raise ConfigError(
            f"got an engine of {num_gpus} GPUs with sglang_pp_size {pp_size}, which does not divide it; "
            "stages are of one size: choose a divisor"
        )
    if dp_size > 1 and not sglang.get("enable_dp_attention"):
        raise ConfigError(
            f"got sglang_dp_size {dp_size} without --sglang-enable-dp-attention: copies of a model are engines of "
            "their own; leave it out, and give more GPUs for more engines"
        )
    tp_size, dense = num_gpus // pp_size, sglang.get("moe_dense_tp_size")
    if dense not in (None, 1, tp_size):
        raise ConfigError(f"got sglang_moe_dense_tp_size {dense}; SGLang knows 1, or {tp_size}, which is its default")
    return EngineLayout(
        tp_size=tp_size,
        pp_size=pp_size,
        dp_size=dp_size,
        ep_size=int(sglang.get("ep_size") or 1),
        dp_lm_head=dp_size > 1 and bool(sglang.get("enable_dp_lm_head")),
        whole_dense_mlp=dense == 1 and tp_size > 1,
        stage_layers=_stages(os.environ.get(STAGES_ENV)) if pp_size > 1 and trained else (),
        draft=bool(sglang.get("speculative_algorithm")),
    )


def layout_of_group(args: Args, model: ServedModel, group: EngineGroup) -> EngineLayout:
    """The layout of a group's engines. Raises `ConfigError` for sizes that do not divide each other."""
    return layout_of(group.num_gpus_per_engine, settings_of_group(args, group), trained=model.trained)


def settings_of_group(args: Args, group: EngineGroup) -> dict[str, Any]:
    """ServerArgs by field name: those of the run, and over them the group's own."""
    return {**args.sglang, **group.overrides}


def server_settings(layout: EngineLayout) -> dict[str, Any]:
    """ServerArgs by field name; `tp_size`, and what differs from an engine of tensor-parallel ranks alone."""
    settings: dict[str, Any] = {"tp_size": layout.tp_size}
    if layout.pp_size > 1:
        settings["pp_size"] = layout.pp_size
    if layout.dp_size > 1:
        settings |= {"dp_size": layout.dp_size, "enable_dp_attention": True}
        settings |= {"enable_dp_lm_head": True} if layout.dp_lm_head else {}
    if layout.ep_size > 1:
        settings["ep_size"] = layout.ep_size
    if layout.whole_dense_mlp:
        settings["moe_dense_tp_size"] = 1
    return settings


def contradictions(layout: EngineLayout, sglang: Mapping[str, Any]) -> list[str]:
    """The ServerArgs that were given and say something else than the layout, by field name."""
    own = {**_PLAIN, "moe_dense_tp_size": layout.tp_size, **server_settings(layout)}
    idle = () if layout.dp_size > 1 else ("enable_dp_attention", "enable_dp_lm_head")  # SGLang takes no notice of them
    given = {name: value for name, value in sglang.items() if name in own and value is not None}
    return sorted(name for name, value in given.items() if value != own[name] and name not in idle)


_PLAIN: Mapping[str, Any] = {
    "tp_size": 1,
    "pp_size": 1,
    "dp_size": 1,
    "ep_size": 1,
    "enable_dp_attention": False,
    "enable_dp_lm_head": False,
}
"""The settings that make a layout -> what SGLang takes without them."""
LAYOUT_SETTINGS = frozenset({*_PLAIN, "moe_dense_tp_size"})
"""All that say something about it."""


def _stages(given: str | None) -> tuple[int, ...]:
    if not given:
        return ()
    try:
        return tuple(int(part) for part in given.split(","))
    except ValueError:
        raise ConfigError(
            f"got {STAGES_ENV}={given!r} in the environment; give the layers of each pipeline stage, as in 14,14"
        ) from None
