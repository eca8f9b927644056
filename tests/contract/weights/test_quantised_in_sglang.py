"""Law 2 for quantised engines: SGLang's own loaders make of a quantised checkpoint, rank by rank, what is expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.core.topology import EngineLayout
from tests.contract.weights.sglang_arithmetic import differing
from tests.contract.weights.sglang_residents import compare_quantised, reload
from tests.support.families import write_family
from tests.support.quantised import write_quantised
from tests.support.ranks import Ranks

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
EXPERTS = {"moe_intermediate_size": 256}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 64,
    "q_lora_rank": 256,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {**SIZES, "tie_word_embeddings": True},
    "qwen3_moe": {**SIZES, **EXPERTS, "mlp_only_layers": []},
    "glm4_moe": {**SIZES, **EXPERTS},
    "deepseek_v3": {**SIZES, **EXPERTS, **LATENT},
    "kimi_k2": {**SIZES, **EXPERTS, **LATENT},
    "minimax_m2": {**SIZES, "intermediate_size": 256},
}
"""Family -> sizes in whole blocks, also of each of two ranks; one latent ends inside a block."""
ONLY = {"int4": {family: ".mlp.experts." for family in ("glm4_moe", "deepseek_v3", "kimi_k2")}}
"""SGLang reads `weight` of shared experts and of latent attention, which INT4 has not; public files keep both."""
IN_BLOCKS_ALONE = ("minimax_m2",)
"""As its public files are."""
LAYOUTS = {
    "one rank": EngineLayout(),
    "TP 2": EngineLayout(tp_size=2),
    "EP 2": EngineLayout(tp_size=2, ep_size=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp8", "channels", "int4"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_rank_holds_the_codes_and_scales_expected_of_it(tmp_path: Path, name: str, kind: str) -> None:
    layout = LAYOUTS[name]
    folders = {}
    for family, own in FAMILIES.items():
        if family in IN_BLOCKS_ALONE and kind != "fp8":
            continue
        source = write_family(tmp_path / "plain" / family, family, **own)
        only = ONLY.get(kind, {}).get(family, "")
        folders[family], _ = write_quantised(source, tmp_path / kind / family, kind, only=only)
    with Ranks(fresh=True) as ranks:
        told = ranks.run(compare_quantised, layout.num_ranks, layout, *folders.values())
    wrong = []
    for rank, by_family in zip(layout.ranks(), told, strict=True):
        for family, found in zip(folders, by_family, strict=True):
            scales = [n for n in found.pop("equal") if n.endswith(("_scale_inv", "_scale"))]
            assert len(scales) > 5, f"{family}: too few scales were compared"
            wrong += [f"{family}, rank {rank}: {found}"] if any(found.values()) else []
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_an_engine_takes_weights_again_that_its_kernels_want_in_another_order(tmp_path: Path) -> None:
    """FP8 of dense layers is transposed once it is loaded; INT4 needs a kernel of a GPU for the same."""
    folders = []
    for seed in range(2):
        source = write_family(tmp_path / f"plain{seed}", "qwen3", seed=seed, **FAMILIES["qwen3"])
        folders.append(write_quantised(source, tmp_path / f"channels{seed}", "channels")[0])
    with Ranks(fresh=True) as ranks:
        (found,) = ranks.run(reload, 1, *folders)
    assert sum("weight_scale" in name for name in found.pop("compared")) > 8
    assert not any(found.values()), found


@pytest.mark.slow
def test_blocks_of_fp8_are_those_of_sglang_bit_for_bit() -> None:
    with Ranks(fresh=True) as ranks:
        ((number, *wrong),) = ranks.run(differing, 1)
    assert not wrong and int(number) >= 40, wrong
